"""Means over a group: displacements sum to zero up to a bounded residual, and all members agree where they have to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import wire
from gossamer.wire.codec import BLOCK
from gossamer.wire.mean import gather_bytes, scatter_bytes

CODECS = ("bfloat16", "int8")


def random(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def mean_by_messages(links, vectors, outs, weights=None, same=False):
    """What real workers do, with lists instead of a network."""
    size, attempts = len(links), 0
    while True:
        attempts += 1
        scattered = [
            link.scatter(vector, size, index, out, same)
            for index, (link, vector, out) in enumerate(zip(links, vectors, outs, strict=True))
        ]
        # A member's own row does not travel.
        received = [
            torch.stack(
                [row[owner] if at != owner else torch.full_like(row[owner], 7) for at, row in enumerate(scattered)]
            )
            for owner in range(size)
        ]
        reduced = torch.stack([link.reduce(rows, weights) for link, rows in zip(links, received, strict=True)])
        done = [link.gather(reduced.clone()) for link in links]
        assert len(set(done)) == 1
        if done[0]:
            return attempts


WAYS = {"messages": mean_by_messages, "in_process": wire.average}
each_way = pytest.mark.parametrize("way", WAYS)


def make_links(name, size):
    return [wire.MeanLink(wire.find(name), seed) for seed in range(size)]


def answers(way, links, vectors, weights=None, same=False):
    outs = [torch.full_like(vector, torch.nan) for vector in vectors]
    attempts = WAYS[way](links, vectors, outs, weights, same)
    return outs, attempts


def near(size, length, distance, seed=0):
    base = random(length, seed)
    return [base + distance * random(length, 100 * seed + member + 1) for member in range(size)]


def total_displacement(outs, vectors, weights=None):
    weights = weights or [1.0] * len(outs)
    return sum(w * (out.double() - vector.double()) for w, out, vector in zip(weights, outs, vectors, strict=True))


@each_way
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("size", "length"), [(2, 5018), (3, 5018), (4, 3), (5, 7 * BLOCK), (8, 5018)])
def test_the_mean_of_workers_is_kept_up_to_a_bounded_residual(way, name, size, length):
    links, residual = make_links(name, size), 0.0
    for count in range(12):
        vectors = near(size, length, 1e-3, seed=count)
        outs, attempts = answers(way, links, vectors)
        assert attempts == 1
        residual = residual + total_displacement(outs, vectors) / size
        # One step of the lattice, however many means.
        assert float(residual.abs().max()) < 3e-3
    kept = torch.cat([link.feedback[next(iter(link.feedback))] for link in links])
    assert torch.allclose(residual, -kept.double(), atol=1e-6)


@each_way
@pytest.mark.parametrize(("name", "error"), [("bfloat16", 0.02), ("int8", 0.2)])
def test_answers_are_the_mean_but_for_little(way, name, error):
    links = make_links(name, 4)
    for count in range(30):
        vectors = near(4, 5018, 1e-3, seed=count)
        outs, attempts = answers(way, links, vectors)
        assert attempts == 1
    mean = torch.stack(vectors).double().mean(0)
    for out, vector in zip(outs, vectors, strict=True):
        assert (out - mean).norm() < error * (vector - mean).norm()


@each_way
@pytest.mark.parametrize("name", CODECS)
def test_averaging_again_and_again_reaches_consensus(way, name):
    links, vectors = make_links(name, 4), [random(2500, seed) for seed in range(4)]
    mean = torch.stack(vectors).double().mean(0)
    for _ in range(60):
        vectors, _ = answers(way, links, vectors)
    assert max(float((vector - mean).abs().max()) for vector in vectors) < 1e-5


@each_way
@pytest.mark.parametrize("name", CODECS)
def test_with_same_all_members_get_the_same_bits(way, name):
    links = make_links(name, 5)
    for count in range(8):
        vectors = near(5, 5018, 1e-2, seed=count)
        outs, _ = answers(way, links, vectors, same=True)
        assert all(torch.equal(out, outs[0]) for out in outs)
        mean = torch.stack(vectors).double().mean(0)
        assert (outs[0] - mean).norm() < 0.01 * mean.norm()


@each_way
@pytest.mark.parametrize("name", CODECS)
def test_weights(way, name):
    links, weights = make_links(name, 3), [1.0, 3.0, 0.0]
    for count in range(25):
        vectors = near(3, 5018, 1e-2, seed=count)
        outs, _ = answers(way, links, vectors, weights)
    mean = (vectors[0].double() + 3 * vectors[1].double()) / 4
    for out in outs:
        assert (out - mean).abs().max() < 6e-3
    residual = total_displacement(outs, vectors, weights) / 4
    assert float(residual.abs().max()) < 2.5e-3
    outs, _ = answers(way, links, vectors, [0.0, 0.0, 0.0], same=True)
    assert outs[0].abs().max() < 0.05


@each_way
@pytest.mark.parametrize("name", CODECS)
def test_a_block_out_of_reach_is_void_for_all(way, name):
    links = make_links(name, 3)
    for _ in range(60):
        answers(way, links, near(3, 3 * BLOCK, 1e-5, seed=0))
    vectors = near(3, 3 * BLOCK, 1e-5, seed=0)
    vectors[1][2 * BLOCK :] += 0.5
    outs, attempts = answers(way, links, vectors)
    assert attempts == 1
    for out, vector in zip(outs, vectors, strict=True):
        assert torch.equal(out[2 * BLOCK :], vector[2 * BLOCK :])
    mean = torch.stack(vectors).mean(0)[: 2 * BLOCK]
    assert all((out[: 2 * BLOCK] - mean).abs().max() < 1e-4 for out in outs)
    for _ in range(8):
        outs, attempts = answers(way, links, vectors)
    mean = torch.stack(vectors).mean(0)
    assert all((out - mean).abs().max() < 0.05 for out in outs)


@each_way
@pytest.mark.parametrize("name", CODECS)
def test_with_same_a_void_mean_is_repeated_for_any_receiver(way, name):
    links = make_links(name, 3)
    for _ in range(60):
        answers(way, links, near(3, 3000, 1e-5, seed=0), same=True)
    vectors = near(3, 3000, 1e-5, seed=0)
    vectors[1] += 100
    outs, attempts = answers(way, links, vectors, same=True)
    assert attempts == 2
    assert all(torch.equal(out, outs[0]) for out in outs)
    mean = torch.stack(vectors).mean(0)
    assert (outs[0] - mean).abs().max() < 1.5
    _, attempts = answers(way, links, vectors, same=True)
    assert attempts == 1


@each_way
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("same", [False, True])
def test_what_is_not_finite_is_seen_by_all_and_leaves_nothing_behind(way, name, same):
    links = make_links(name, 3)
    answers(way, links, near(3, 5018, 1e-3), same=same)
    for bad in range(3):
        vectors = near(3, 5018, 1e-3)
        vectors[bad][4000] = torch.nan
        outs, _ = answers(way, links, vectors, same=same)
        assert all(torch.isnan(out[4000]) for out in outs)
    outs, _ = answers(way, links, near(3, 5018, 1e-3), same=same)
    assert all(torch.isfinite(out).all() for out in outs)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CODECS), st.sampled_from(sorted(WAYS)), st.booleans(),
       st.lists(st.tuples(*[st.floats(-(2.0**60), 2.0**60, width=32)] * 3), min_size=1, max_size=20))  # fmt: skip
def test_any_three_vectors(name, way, same, elements):
    links = make_links(name, 3)
    vectors = list(torch.tensor(elements).T.contiguous())
    largest = max(float(vector.abs().max()) for vector in vectors)
    for _ in range(2):
        outs, _ = answers(way, links, vectors, same=same)
        assert all(torch.isfinite(out).all() for out in outs)
        if same:
            assert all(torch.equal(out, outs[0]) for out in outs)
        else:
            assert float(total_displacement(outs, vectors).abs().max()) <= 0.2 * largest


@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_those_of_the_messages(name):
    links, vectors = make_links(name, 4), near(4, 50_000, 1e-3)
    codec, outs = links[0].codec, [torch.empty(50_000) for _ in range(4)]
    scattered = [link.scatter(v, 4, i, o) for i, (link, v, o) in enumerate(zip(links, vectors, outs, strict=True))]
    reduced = links[0].reduce([rows[0] for rows in scattered])
    assert scattered[0].shape == (4, scatter_bytes(codec, 50_000, 4))
    assert reduced.shape == (gather_bytes(codec, 50_000, 4),)
    sent = 3 * scattered[0].shape[1] + 3 * reduced.shape[0]
    assert sent == wire.mean_bytes(codec, 50_000, 4)
    assert sent == pytest.approx({"bfloat16": 0.5, "int8": 0.25}[name] * wire.mean_bytes(None, 50_000, 4), rel=0.01)


@each_way
@pytest.mark.parametrize("name", CODECS)
def test_means_go_on_from_a_checkpoint(way, name):
    links, restored = make_links(name, 3), make_links(name, 3)
    for count in range(3):
        answers(way, links, near(3, 3000, 1e-3, seed=count))
    for old, new in zip(links, restored, strict=True):
        new.load_state_dict(old.state_dict())
    vectors = near(3, 3000, 1e-3, seed=9)
    expected, _ = answers(way, links, vectors)
    outs, _ = answers(way, restored, vectors)
    assert all(map(torch.equal, outs, expected))
