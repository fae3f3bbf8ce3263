"""The end of a run on the ranks of one replica: they start it again, or leave, together."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer.process.averages.final_average import FinalAverage
from gossamer.process.lifecycle import StepRetry
from gossamer.process.replica.agreement import Agreement

SHARDS = 2


class Inner:
    """What a rank gathers with the others: a mistake in the order or the shape fails at once."""

    def __init__(self, shard: int, barrier: threading.Barrier, given: list[Any]) -> None:
        self.shard, self.size, self.ranks = shard, SHARDS, list(range(SHARDS))
        self._barrier, self._given = barrier, given

    def gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.shard] = own
        self._barrier.wait()
        parts = list(self._given)
        self._barrier.wait()
        assert {(part.shape, part.dtype) for part in parts} == {(own.shape, own.dtype)}
        return parts


class Members(SimpleNamespace):
    def request(self, generation: int) -> None:
        self.requested = max(self.requested, generation)


def rank_of_a_replica(shard: int, inner: Inner, notices: bool) -> tuple[FinalAverage, list[str]]:
    """Return one whose first wait for the others is interrupted if it ``notices`` that a replica is gone."""
    agreement = Agreement(inner, inner, SimpleNamespace(lost=""))  # type: ignore[arg-type]
    agreement.copies = SimpleNamespace(squared_distance=lambda a, b: float(((a - b) ** 2).sum()))  # type: ignore[assignment]
    entries = SimpleNamespace(exchange=lambda *_: {1: ""})
    of = Members(members=[0, 1], generation=0, requested=0, key="finish", entries=entries)
    flat_model = SimpleNamespace(x=torch.zeros(3), two_vectors=False, load_weights=lambda x: None)
    state = SimpleNamespace(replica=agreement, method=SimpleNamespace(finish=None), needs_state=False)
    heartbeats, metrics = SimpleNamespace(has_left=lambda rank: False, lost=set()), SimpleNamespace(consensus=0.0)
    done: list[str] = []
    final = FinalAverage(
        SimpleNamespace(  # type: ignore[arg-type]
            rank=0, store=SimpleNamespace(hosted_here=False), groups=SimpleNamespace(finish=of), heartbeats=heartbeats,
            flat_model=flat_model, state=state, metrics=metrics, everybody=[0, 1], leave=lambda: done.append("left"),
        )
    )  # fmt: skip

    def begin() -> bool:
        of.generation = of.requested
        done.append("began")
        return agreement.all_true(True)

    def average() -> None:
        flat_model.x = torch.full((3,), 2.0)
        if notices and done.count("began") == 1:
            of.request(1)

    final._begin, final._average = begin, average  # type: ignore[method-assign]
    heartbeats.has_left = lambda rank: True
    return final, done


@pytest.mark.parametrize("noticing", [0, 1])
def test_ranks_of_a_replica_start_the_final_average_again_together(noticing: int) -> None:
    barrier, given = threading.Barrier(SHARDS, timeout=10), [None] * SHARDS
    ranks = [rank_of_a_replica(shard, Inner(shard, barrier, given), shard == noticing) for shard in range(SHARDS)]
    failed = []

    def run(final: FinalAverage) -> None:
        try:
            final.run()
        except (threading.BrokenBarrierError, AssertionError, StepRetry) as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(final,), daemon=True) for final, _ in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failed == []
    for final, done in ranks:
        assert done == ["began", "began", "left"]
        assert final.runtime.metrics.consensus == pytest.approx((SHARDS * 3 * 2.0**2) ** 0.5)
