"""Exchanges of two workers: displacements sum to zero, averaging converges, and what cannot be decoded is void."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer import wire
from gossamer.wire.codec import BLOCK
from gossamer.wire.link import Link, message_bytes

CODECS = ("bfloat16", "int8")


def random(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def pair(name):
    return tuple(Link(wire.find(name), seed) for seed in (1, 2))


def exchange(links, x, y):
    outs = torch.full_like(x, torch.nan), torch.full_like(y, torch.nan)
    void = wire.exchange(links, (x, y), outs)
    return *outs, void


@dataclass(frozen=True)
class Nearest:
    """A codec of a user: torch's own bfloat16, which rounds to the nearest."""

    name = "nearest"
    block = 100
    headroom = 1.0

    def size_bytes(self, num_elements):
        return 2 * num_elements

    def first_reach(self, vector):
        return None

    def encode(self, vector, reach, seed, message, lost=None):
        message.view(torch.bfloat16).copy_(vector)
        if lost is not None:
            torch.sub(vector, message.view(torch.bfloat16), out=lost)

    def decode(self, message, reference, out, weight=1.0):
        out.add_(message.view(torch.bfloat16), alpha=weight)
        return torch.zeros(-(-len(out) // self.block))


def neighbours(graph, workers, generator):
    i = int(torch.randint(workers, (1,), generator=generator))
    away = 1 if graph == "ring" else 1 + int(torch.randint(workers - 1, (1,), generator=generator))
    return i, (i + away) % workers


def average(codec, exchanges, goal=0.0, graph="ring", workers=16, dim=300, start=None):
    """Random neighbours average their vectors. Return the distance left, the exchanges made, how far the mean moved."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn((workers, dim), generator=generator) if start is None else start.clone()
    mean = x.double().mean(0)
    links = [wire.Links(codec, seed=0, rank=rank) for rank in range(workers)]
    begin = float((x - x.mean(0)).norm())
    left, count = 1.0, 0
    while left >= goal and count < exchanges:
        i, j = neighbours(graph, workers, generator)
        one, two, _ = exchange((links[i].to(j), links[j].to(i)), x[i], x[j])
        x[i], x[j] = x[i] + (one - x[i]) / 2, x[j] + (two - x[j]) / 2
        left, count = float((x - x.mean(0)).norm()) / begin, count + 1
    return left, count, float((x.double().mean(0) - mean).abs().max())


@pytest.mark.parametrize(
    ("name", "graph", "most"),
    # Without rounding it takes 1,892 exchanges on the ring and 224 on the complete graph.
    [("bfloat16", "ring", 1_900), ("bfloat16", "complete", 230), ("int8", "ring", 2_100), ("int8", "complete", 500)],
)
def test_averaging_goes_on_to_the_precision_of_float32(name, graph, most):
    left, exchanges, moved = average(wire.find(name), most, goal=1e-4, graph=graph)
    assert left < 1e-4
    assert exchanges < most
    assert moved < 1e-6


@pytest.mark.parametrize("name", CODECS)
def test_one_worker_that_is_far_away_is_averaged_too(name):
    start = 1 + 1e-3 * torch.stack([random(300, seed) for seed in range(16)])
    start[0] += 1
    left, _, _ = average(wire.find(name), exchanges=900, goal=1e-6, graph="complete", start=start)
    assert left < 1e-6


def test_rounding_to_the_nearest_bfloat16_stops_averaging():
    left, _, moved = average(wire.find(Nearest()), exchanges=600, graph="complete")
    assert left > 2e-4
    assert moved < 1e-6


def test_stochastic_rounding_to_bfloat16_alone_stops_averaging_too():
    class Forgetful(type(wire.find("bfloat16"))):
        def encode(self, vector, reach, seed, message, lost=None):
            super().encode(vector, None, seed, message, lost)

    left, _, moved = average(Forgetful(), exchanges=600, graph="complete")
    assert left > 2e-4
    assert moved < 1e-6


vectors = st.lists(st.tuples(*[st.floats(-(2.0**60), 2.0**60, width=32)] * 2), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CODECS), st.lists(vectors, min_size=1, max_size=4))
def test_displacements_of_any_two_vectors_sum_to_zero(name, history):
    links = pair(name)
    for elements in history:
        x, y = torch.tensor(elements).T.contiguous()
        one, two, void = exchange(links, x, y)
        total = (one.double() - x.double()) + (two.double() - y.double())
        largest = max(float(x.abs().max()), float(y.abs().max()))
        assert float(total.abs().max()) <= 3e-7 * largest
        if void:
            assert torch.equal(one, x)
            assert torch.equal(two, y)


@pytest.mark.parametrize(("name", "error"), [("bfloat16", 0.01), ("int8", 0.15)])
def test_answers_are_the_peers_vector_but_for_little(name, error):
    links, base = pair(name), random(5 * BLOCK + 17)
    for count in range(30):
        x, y = (base + 1e-3 * random(len(base), seed=2 * count + at + 1) for at in (0, 1))
        one, two, void = exchange(links, x, y)
        assert void == 0
        for answer, theirs in ((one, y), (two, x)):
            # Before the distance is known, rounding is small beside the elements.
            assert (answer - theirs).norm() < 0.005 * x.norm()
    for answer, theirs in ((one, y), (two, x)):
        assert (answer - theirs).norm() < error * (x - y).norm()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("jump", [30.0, 1e4])
def test_a_distance_that_jumps_voids_that_block_and_recovers(name, jump):
    links, base = pair(name), random(8 * BLOCK)
    for count in range(40):
        exchange(links, base, base + 1e-4 * random(len(base), seed=count))
    lost = 0
    for count in range(20):
        far = base + 1e-4 * random(len(base), seed=100 + count)
        far[2 * BLOCK : 3 * BLOCK] += 1e-4 * jump
        one, two, void = exchange(links, base, far)
        assert void <= 1
        lost += void
        if void:
            assert torch.equal(one[2 * BLOCK : 3 * BLOCK], base[2 * BLOCK : 3 * BLOCK])
            assert torch.equal(two[2 * BLOCK : 3 * BLOCK], far[2 * BLOCK : 3 * BLOCK])
        # The noise in the other blocks does not grow.
        others = torch.cat((one[: 2 * BLOCK] - far[: 2 * BLOCK], one[3 * BLOCK :] - far[3 * BLOCK :]))
        assert others.abs().max() < 1e-4
    assert lost <= 8
    assert void == 0


def test_int8_recovers_from_anything_in_a_few_exchanges():
    links, base = pair("int8"), random(3000)
    for _ in range(300):
        exchange(links, torch.zeros(3000), torch.zeros(3000))
    voids = [exchange(links, base, 1e3 * random(3000, seed=1))[2] for _ in range(12)]
    assert sum(void > 0 for void in voids) <= 8
    assert voids[-1] == 0


@pytest.mark.parametrize("name", CODECS)
def test_a_block_that_was_zero_for_long(name):
    links = pair(name)
    zero, base = torch.zeros(2 * BLOCK), random(2 * BLOCK)
    base[:BLOCK] = 0
    for _ in range(200):
        assert exchange(links, base, base)[2] == 0
    zero[BLOCK:] = base[BLOCK:]
    base[:BLOCK] = 0.1 * random(BLOCK, seed=1)
    voids = [exchange(links, base, zero)[2] for _ in range(6)]
    assert sum(voids) <= 4
    assert voids[-1] == 0


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("first", [True, False])
def test_both_ends_see_that_a_vector_is_not_finite(name, first):
    links, healthy = pair(name), random(3000)
    if not first:
        exchange(links, healthy, healthy + 0.001)
    poisoned = healthy + 0.001
    poisoned[5] = torch.nan
    one, _, _ = exchange(links, healthy, poisoned)
    for link, own, peer in ((links[0], True, False), (links[1], False, True)):
        assert (link.norm < float("inf")) == own
        assert (link.peer_norm < float("inf")) == peer
    # Blocks without it are exchanged.
    assert torch.isfinite(one[BLOCK:]).all()
    # Nothing is left of it.
    for seed in range(3):
        one, two, void = exchange(links, healthy, healthy + 0.001 * random(3000, seed))
    assert void == 0
    assert torch.isfinite(one).all()
    assert torch.isfinite(two).all()


@pytest.mark.parametrize("name", CODECS)
def test_norms_are_the_same_at_both_ends(name):
    links = pair(name)
    x, y = random(3000), 2 * random(3000, seed=1)
    exchange(links, x, y)
    assert links[0].norm == links[1].peer_norm == pytest.approx(float(x.norm()))
    assert links[1].norm == links[0].peer_norm == pytest.approx(float(y.norm()))


@pytest.mark.parametrize("name", CODECS)
def test_the_steps_of_a_real_worker(name):
    links, x, y = pair(name), random(5018), random(5018) + 0.01
    both = ((links[0], x, torch.empty(5018)), (links[1], y, torch.empty(5018)))
    buffer = torch.empty(message_bytes(links[0].codec, 5018), dtype=torch.uint8)
    messages = [both[0][0].encode(x, both[0][2], buffer), both[1][0].encode(y, both[1][2])]
    assert messages[0] is buffer
    assert buffer.shape == messages[1].shape
    # What arrives is a copy in other memory.
    arrived = [messages[1].clone(), messages[0].clone()]
    decoded = [link.decode(message, vector, out) for (link, vector, out), message in zip(both, arrived, strict=True)]
    assert decoded[0].dtype == torch.uint8
    assert len(decoded[0]) == -(-5018 // BLOCK)
    for at, (link, vector, out) in enumerate(both):
        link.settle(decoded[at], decoded[1 - at].clone(), vector, out)
    reference = exchange(pair(name), x, y)
    assert torch.equal(both[0][2], reference[0])
    assert torch.equal(both[1][2], reference[1])


@pytest.mark.parametrize("name", CODECS)
def test_a_new_edge_expects_what_the_latest_exchange_was_like(name):
    codec, base = wire.find(name), random(3000)
    links = [wire.Links(codec, seed=0, rank=rank) for rank in range(3)]
    near = [base + 1e-5 * random(3000, seed) for seed in range(3)]
    for i, j in ((0, 1), (1, 2)) * 60:
        exchange((links[i].to(j), links[j].to(i)), near[i], near[j])
    one, _, void = exchange((links[0].to(2), links[2].to(0)), near[0], near[2])
    assert void == 0
    assert (one - near[2]).norm() < 0.3 * (near[0] - near[2]).norm()


@pytest.mark.parametrize("name", CODECS)
def test_links_go_on_from_a_checkpoint(name):
    codec, base = wire.find(name), random(3000)
    old = [wire.Links(codec, seed=0, rank=rank) for rank in range(3)]
    new = [wire.Links(codec, seed=0, rank=rank) for rank in range(3)]

    def exchanges(links, count, seed):
        for at, (i, j) in enumerate(((0, 1), (1, 2), (2, 0), (0, 1), (0, 2), (1, 0)) * count):
            x, y = base, base + 10.0 ** -(1 + at % 4) * random(3000, seed + at)
            yield exchange((links[i].to(j), links[j].to(i)), x, y)[0]

    list(exchanges(old, 3, seed=0))
    for each, restored in zip(old, new, strict=True):
        restored.load_state_dict(each.state_dict())
    assert all(map(torch.equal, exchanges(old, 2, seed=50), exchanges(new, 2, seed=50)))
