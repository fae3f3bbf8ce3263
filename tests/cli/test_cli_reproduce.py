"""``gossamer reproduce``: the list, a whole experiment, going on where it was interrupted, mistakes."""

import json

import pytest

from gossamer.reproduce.experiment import names

EXPERIMENT = """
title = "How far apart workers are"
paper = "Nobody, 2026"
claim = "averaging brings workers together."
note = "For the tests."
measures = ["consensus", "loss"]
seeds = 2

[settings]
task = "quadratic"
clock = "ideal"

[full]
workers = 8
steps = 20

[reduced]
workers = 4
steps = 4

[[axes]]
name = "topology"
values = ["ring", "complete"]

[[axes]]
name = "method"
values = ["allreduce", { label = "gossip, rate 2", method = "gossip", rate = 2 }]

[[leave_out]]
method = "allreduce"
topology = "ring"

[[published]]
topology = "complete"
method = "allreduce"
consensus = 0

[picture]
x = "topology"
y = "consensus"
"""


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(EXPERIMENT)
    return path


def test_the_list_names_every_experiment(gossamer):
    ran = gossamer("reproduce")
    assert ran.code == 0
    for name in names():
        assert name in ran.out
    document = gossamer("reproduce", "--json").document
    assert [entry["experiment"] for entry in document["experiments"]] == names()


def test_an_experiment_leaves_runs_a_table_and_a_picture(gossamer, experiment, tmp_path):
    ran = gossamer("reproduce", experiment, "--out", "here")
    assert ran.code == 0
    assert "6 runs to do" in ran.err
    assert "--data is not used" not in ran.err
    assert "How far apart workers are (reduced size)" in ran.out
    folder = tmp_path / "here"
    runs = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert runs == sorted(
        f"{name}-seed{seed}"
        for name in ("ring-gossip__rate_2", "complete-allreduce", "complete-gossip__rate_2")
        for seed in (0, 1)
    )
    assert all((folder / run / "summary.json").exists() for run in runs)
    page = (folder / "table.md").read_text()
    assert "| complete | allreduce | 0 | 0 |" in page
    assert "gossamer reproduce" in page
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    report = gossamer("report", folder / runs[0], folder / runs[2], "--out", "page.html")
    assert report.code == 0


def test_data_that_nothing_needs_is_said(gossamer, experiment):
    ran = gossamer("reproduce", experiment, "--seeds", 1, "--only", "topology=ring", "--data", "somewhere")
    assert ran.code == 0
    assert "--data is not used" in ran.err


def test_json_is_one_document(gossamer, experiment):
    ran = gossamer("reproduce", experiment, "--json", "--seeds", 1, "--only", "topology=complete")
    assert ran.err == ""
    document = ran.document
    assert (document["experiment"], document["size"], document["interrupted"]) == ("mine", "reduced", False)
    first, second = document["rows"]
    assert (first["method"], first["seeds"], first["published"]) == ("allreduce", [0], {"consensus": 0.0})
    assert first["ours"]["consensus"] == [0.0]
    assert second["ours"]["consensus"][0] > 0


def test_an_interrupted_experiment_goes_on(gossamer, experiment, tmp_path, monkeypatch):
    import gossamer.cli.live_simulation as live

    simulate_live, done = live.simulate_live, []

    def interrupted_at_third(*arguments, **named):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(arguments[1].name)
        return simulate_live(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(live, "simulate_live", interrupted_at_third)
        ran = gossamer("reproduce", experiment, "--out", "here")
    assert ran.code == 130
    assert "the same command goes on from here" in ran.err
    assert len(json.loads((tmp_path / "here" / "table.json").read_text())["rows"]) == 2
    # A run that was killed has no summary.
    (tmp_path / "here" / done[0] / "summary.json").unlink()
    ran = gossamer("reproduce", experiment, "--out", "here")
    assert ran.code == 0
    assert "5 runs to do; 1 of 6 were complete" in ran.err
    assert f"{done[0]} was not complete: run again" in ran.err
    assert "0 runs to do; 6 of 6 were complete" in gossamer("reproduce", experiment, "--out", "here").err


def test_a_folder_of_other_runs_is_refused(gossamer, experiment, tmp_path):
    assert gossamer("reproduce", experiment, "--out", "here", "--seeds", 1).code == 0
    gossamer("reproduce", experiment, "--out", "here", "--size", "full").refused("here", "reduced size", "another")
    experiment.write_text(EXPERIMENT.replace("steps = 4", "steps = 5"))
    gossamer("reproduce", experiment, "--out", "here", "--seeds", 1).refused("steps 4 instead of 5")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a2cid2-ring46"], ["a2cid2-ring64"]),
        (["nowhere.toml"], ["nowhere.toml", "cannot be read"]),
        (["mine.toml", "--seeds", "0"], ["--seeds is 0"]),
        (["mine.toml", "--only", "ring"], ["--only", "AXIS=VALUE"]),
        (["mine.toml", "--only", "topology=rign"], ["rign", "ring"]),
        (["mine.toml", "--only", "topology=ring", "--only", "method=allreduce"], ["--only leaves no row"]),
        (["mine.toml", "--device", "tpu"], ["tpu"]),
        (["mine.toml", "--out", ""], ["--out is empty"]),
        (["a2cid2-ring64", "--size", "full"], ["cifar10", "data"]),
    ],
)
def test_mistakes_are_one_line(gossamer, experiment, arguments, words, tmp_path):
    gossamer("reproduce", *arguments).refused(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.toml"]
