"""``gossamer topology``: constants and pictures."""

import math

import pytest

FIELDS = {"topology", "workers", "edges", "chi1", "chi2", "eta", "alpha_tilde", "spectral_gap"}


def test_the_document_has_the_constants(gossamer):
    outcome = gossamer("topology", "ring", "--workers", "16", "--json")
    assert outcome.code == 0
    assert outcome.err == ""
    assert set(outcome.document) >= FIELDS
    ring = outcome.document
    assert (ring["workers"], ring["edges"]) == (16, 16)
    assert ring["chi1"] == pytest.approx(13.14, abs=0.01)
    assert ring["chi2"] == pytest.approx(0.9375)
    assert ring["eta"] == pytest.approx(0.1425, abs=1e-4)
    assert ring["alpha_tilde"] == pytest.approx(1.872, abs=1e-3)
    assert ring["rounds_to_consensus"] is None


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 15])
def test_any_count_and_only_finite_numbers(gossamer, workers):
    for name in ("ring", "star", "torus", "exponential", "one-peer-exponential", "random-regular", "base", "complete"):
        document = gossamer("topology", name, "--workers", workers, "--json").document
        assert document["workers"] == workers
        assert all(math.isfinite(value) for value in document.values() if isinstance(value, float))


def test_the_table_has_the_same_figures(gossamer):
    table = gossamer("topology", "ring", "--workers", "64")
    assert table.code == 0
    assert "ring, 64 workers, rate 1" in table.out
    for value in ("207.7", "0.9844", "0.03497", "7.262"):
        assert value in table.out


def test_the_rate_scales_the_constants(gossamer):
    slow, fast = (gossamer("topology", "ring", "--rate", rate, "--json").document for rate in (1, 2))
    assert slow["chi1"] == pytest.approx(2 * fast["chi1"])
    assert fast["eta"] == pytest.approx(2 * slow["eta"])


def test_a_bad_number_of_workers_names_those_that_fit(gossamer):
    gossamer("topology", "hypercube", "--workers", "6").refused("power of two", "4 or 8")


def test_a_stand_in_is_announced(gossamer):
    outcome = gossamer("topology", "one-peer-exponential", "--workers", "6")
    assert "note: one-peer-exponential needs a power of two; base takes its place" in outcome.out


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot_draws_a_picture(gossamer, tmp_path, suffix, start):
    outcome = gossamer("topology", "torus:3x4", "--plot", f"picture.{suffix}")
    assert outcome.code == 0
    assert f"drawn to picture.{suffix}" in outcome.out
    assert (tmp_path / f"picture.{suffix}").read_bytes().startswith(start)
