"""The world of any order gives the answers that the effects promise, and refuses what no world can answer."""

import pytest
import torch

from gossamer.effects import Gather, Mean, MethodGenerator, Pair, Shift, Start, Swap, Update, Wait, yields
from gossamer.errors import MethodError
from gossamer.methods import Method, MethodConfig
from gossamer.testing.violations import Broken
from gossamer.testing.worlds.any_order import AnyOrderWorld
from gossamer.topology import build

WORKERS = 4


class Probe(Method):
    """Runs ``request(worker)`` in its first step and keeps the answers."""

    name = "probe"
    summary = "asks"

    def __init__(self, request):
        super().__init__(MethodConfig(), build("ring", WORKERS))
        self.request, self.answers = request, {}

    @yields(Update, Mean, Gather, Shift, Start, Wait)
    def step(self, worker):
        yield Update()
        self.answers[worker.rank] = yield from self.request(worker)


def answers_of(request):
    probe = Probe(request)
    world = AnyOrderWorld(probe, steps=1, choices=[], seed=3)
    world.run()
    return probe.answers


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_a_mean_is_weighted_and_scalars_travel_along():
    def request(worker):
        rank = float(worker.rank)
        return (yield Mean(vector(rank, 1.0), round=0, weight=rank, scalars=(rank, 2.0)))

    for mean, scalars in answers_of(request).values():
        torch.testing.assert_close(mean, vector(14 / 6, 1.0))
        assert scalars == pytest.approx((14 / 6, 2.0))


def test_a_mean_without_any_weight_is_zero():
    def request(worker):
        return (yield Mean(vector(5.0), round=0, weight=0.0))

    assert all(mean == vector(0.0) for mean in answers_of(request).values())


def test_groups_gather_among_themselves():
    def request(worker):
        group = (0, 1) if worker.rank < 2 else (2, 3)
        return (yield Gather((vector(worker.rank), vector(10.0 + worker.rank)), round=0, group=group))

    for rank, gathered in answers_of(request).items():
        first = 0 if rank < 2 else 2
        assert gathered == [(vector(member), vector(10.0 + member)) for member in (first, first + 1)]


def test_a_shift_sends_to_one_and_receives_from_another():
    def request(worker):
        rank = worker.rank
        to, source = (rank + 1) % WORKERS, (rank - 1) % WORKERS
        ticket = yield Start(Shift(vector(rank), to=to, source=source, round=0, scalars=(float(rank),)))
        return (yield Wait(ticket))

    for rank, shifted in answers_of(request).items():
        source = (rank - 1) % WORKERS
        assert shifted == (vector(source), (float(source),), True)


@pytest.mark.parametrize(
    ("request_of", "said"),
    [
        (lambda rank: Mean(vector(*range(2 + rank % 2)), round=0), "expected the same on all members"),
        (lambda rank: Mean(vector(1.0), round=0, group=(0, 1)), "it is not a member of that group"),
        (lambda rank: Mean(vector(1.0), round=0, group=(3, 2, 1, 0)), "expected the group in ascending order"),
        (lambda rank: Shift(vector(1.0), to=rank, source=0, round=0), "expected source to be the inverse of to"),
        (lambda rank: Mean(vector(1.0), round=0) if rank else Gather((vector(1.0),), round=0), "nobody can go on"),
    ],
)
def test_collectives_that_do_not_fit_together_are_refused(request_of, said):
    def request(worker):
        return (yield request_of(worker.rank))

    with pytest.raises(Broken, match=said) as caught:
        answers_of(request)
    assert caught.value.rule == "collectives"


def test_rounds_ascend():
    def request(worker):
        yield Mean(worker.x.clone(), round=1)
        yield Mean(worker.x.clone(), round=1)

    with pytest.raises(Broken, match="expected ascending rounds within a topic"):
        answers_of(request)


def test_what_is_not_declared_is_refused():
    def request(worker):
        yield Swap(worker.x, 0)

    with pytest.raises(MethodError, match="only background may"):
        answers_of(request)


class Pairs(Method):
    """Gossip whose swaps are started, with the sender's rank along."""

    name = "pairs"
    summary = "pairs"

    @yields(Pair, Start, Swap, Wait)
    def background(self, worker):
        while True:
            peer = yield Pair(1.0)
            sent = worker.x.clone()
            answer = yield Wait((yield Start(Swap(sent, peer, scalars=(float(worker.rank),)))))
            if answer is not None:
                received, (rank,) = answer
                assert rank == peer
                worker.x.add_(received - sent, alpha=0.5)


def test_swaps_may_be_started_and_carry_scalars():
    world = AnyOrderWorld(Pairs(MethodConfig(), build("ring", WORKERS)), steps=20, choices=[], seed=1)
    before = sum(worker.x.clone() for worker in world.workers)
    world.run()
    assert world.num_exchanges > 10
    torch.testing.assert_close(sum(worker.x for worker in world.workers), before + world.added, rtol=0, atol=1e-12)


class Everything(Method):
    """Uses each effect once per step, and checks its answer."""

    name = "everything"
    summary = "for a test"

    def begin(self, worker):
        worker.vector("anchor").copy_(worker.x)
        assert worker.offsets == tuple(range(len(worker.x) + 1))

    @yields(Update, Mean, Gather, Shift, Start, Wait)
    def step(self, worker) -> MethodGenerator:
        rank, n, round = worker.rank, worker.num_workers, worker.step
        yield Update()
        mine = torch.full((2,), float(rank), dtype=torch.float64)
        mean, scalars = yield Mean(mine, round=round, weight=rank, scalars=(rank, 1.0))
        total = sum(range(n))
        assert mean.tolist() == pytest.approx([sum(r * r for r in range(n)) / total] * 2)
        assert scalars == pytest.approx((float(mean[0]), 1.0))
        group = (0,) if rank == 0 else tuple(range(1, n))
        gathered = yield Gather((mine,), round=round, group=group)
        assert [float(each[0][0]) for each in gathered] == list(group)
        hop = 1 + round % (n - 1)
        ticket = yield Start(Shift(mine, (rank + hop) % n, (rank - hop) % n, round=round, scalars=(10.0 * rank,)))
        shifted = yield Wait(ticket)
        source = (rank - hop) % n
        assert (float(shifted.vector[0]), shifted.scalars, shifted.delivered) == (source, (10.0 * source,), True)
        worker.scalars["steps"] = worker.scalars.get("steps", 0) + 1

    @yields(Pair, Start, Swap, Wait)
    def background(self, worker) -> MethodGenerator:
        while True:
            peer = yield Pair(1.0)
            ticket = yield Start(Swap(worker.snapshot(), peer, scalars=(float(worker.rank),)))
            answer = yield Wait(ticket)
            if answer is not None:
                assert answer[1] == (float(peer),)
                worker.scalars["swaps"] = worker.scalars.get("swaps", 0) + 1


@pytest.mark.parametrize("seed", range(5))
def test_every_effect_is_answered(seed):
    world = AnyOrderWorld(Everything(MethodConfig(), build("complete", 4)), steps=8, choices=[], seed=seed)
    world.run()
    world.finish()
    assert all(worker.scalars["steps"] == 8 for worker in world.workers)
    assert sum(worker.scalars.get("swaps", 0) for worker in world.workers) > 4


class SwapsWithAnybody(Pairs):
    @yields(Pair, Swap)
    def background(self, worker):
        peer = yield Pair(1.0)
        yield Swap(worker.snapshot(), (peer + 1) % worker.num_workers)


class PairsTwice(Pairs):
    @yields(Pair, Swap)
    def background(self, worker):
        yield Pair(1.0)
        yield Pair(1.0)


@pytest.mark.parametrize(
    ("method", "said"), [(SwapsWithAnybody, "which is not the peer of its Pair"), (PairsTwice, "yields Pair again")]
)
def test_each_pair_is_for_one_swap(method, said):
    world = AnyOrderWorld(method(MethodConfig(), build("ring", WORKERS)), steps=20, choices=[], seed=1)
    with pytest.raises(Broken, match=said) as caught:
        world.run()
    assert caught.value.rule == "effects"
