"""The world of any order knows every effect, and notices what a method must not do."""

import pytest
import torch
from any_order_world import AnyOrderWorld

from gossamer.effects import Gather, Mean, MethodGenerator, Pair, Shift, Start, Swap, Update, Wait, yields
from gossamer.errors import MethodError
from gossamer.methods import Method, MethodConfig
from gossamer.topology import build


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


def broken(*effects):
    """A method whose step yields what these functions of the worker return."""

    class Broken(Method):
        name = "broken"
        summary = "for a test"

        @yields(Mean, Update, Start)
        def step(self, worker):
            for effect in effects:
                yield effect(worker)

    return AnyOrderWorld(Broken(MethodConfig(), build("ring", 3)), steps=2, choices=[])


def test_what_a_method_must_not_do_is_noticed():
    with pytest.raises(MethodError, match="step of method broken yielded Gather, which it does not declare"):
        broken(lambda worker: Gather((worker.x,), round=0)).run()
    with pytest.raises(AssertionError, match="round 0 of 'mean' after round 0"):
        broken(lambda worker: Mean(worker.x, round=0)).run()
    with pytest.raises(AssertionError, match="a vector changed while it was in flight"):
        broken(lambda worker: Start(Mean(worker.x, round=worker.step)), lambda worker: Update()).run()
