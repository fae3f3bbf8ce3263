"""Rendezvous: the workers that take part in one round of a collective (``Mean`` or ``Gather``) wait for each other.

A rendezvous is complete when every expected worker has arrived. Expected is a member that is alive and whose last round
of this topic is an earlier one. A worker that dies is not expected any more. A worker that joins takes over its peer's
last rounds, so it is expected from the peer's next round on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gossamer.effects import Gather, Mean
from gossamer.virtual.sim.virtual_worker import VirtualWorker

OnAnswer = Callable[[Any], None]
"""Called with the result of the collective."""


class Rendezvous:
    """One round of one topic, and the workers that have arrived."""

    def __init__(self, topic: str, round: int, members: tuple[VirtualWorker, ...]) -> None:
        self.topic, self.round, self.members = topic, round, members
        self.arrived: dict[int, tuple[VirtualWorker, Mean | Gather, OnAnswer]] = {}
        self.num_missing = 0
        self.count_missing()

    def count_missing(self) -> None:
        """Count the expected workers that have not arrived."""
        self.num_missing = sum(
            worker.alive and worker.rank not in self.arrived and worker.last_rounds.get(self.topic, -1) < self.round
            for worker in self.members
        )

    def add(self, worker: VirtualWorker, effect: Mean | Gather, on_answer: OnAnswer) -> None:
        # A worker that joined with its peer's last rounds may arrive without being expected.
        expected = worker.rank not in self.arrived and worker.last_rounds.get(self.topic, -1) < self.round
        self.arrived[worker.rank] = (worker, effect, on_answer)
        worker.last_rounds[self.topic] = self.round
        self.num_missing -= expected

    def remove(self, rank: int) -> None:
        """Drop the contribution of a worker that died."""
        self.arrived.pop(rank, None)
        self.count_missing()


class RendezvousTable:
    """All open rendezvous. Calls ``complete(rendezvous)`` when one is complete."""

    def __init__(self, workers: list[VirtualWorker], complete: Callable[[Rendezvous], None]) -> None:
        self.workers, self.complete = workers, complete
        self.open: dict[tuple[str, int, tuple[int, ...] | None], Rendezvous] = {}

    def arrive(self, worker: VirtualWorker, effect: Mean | Gather, on_answer: OnAnswer) -> None:
        """Add the contribution of ``worker`` to its rendezvous."""
        group = effect.group if isinstance(effect, Mean) else None
        key = (effect.topic, effect.round, group)
        rendezvous = self.open.get(key)
        if rendezvous is None:
            members = tuple(self.workers) if group is None else tuple(self.workers[rank] for rank in group)
            rendezvous = self.open[key] = Rendezvous(effect.topic, effect.round, members)
        rendezvous.add(worker, effect, on_answer)
        if rendezvous.num_missing <= 0:
            del self.open[key]
            self.complete(rendezvous)

    def on_membership_change(self, left: int | None = None) -> None:
        """After worker ``left`` died or another joined, complete every rendezvous that misses nobody any more."""
        for key, rendezvous in list(self.open.items()):
            if left is None:
                rendezvous.count_missing()
            else:
                rendezvous.remove(left)
            if rendezvous.num_missing <= 0:
                del self.open[key]
                if rendezvous.arrived:
                    self.complete(rendezvous)

    def complete_all(self) -> bool:
        """Complete every open rendezvous with the workers that have arrived. Return False if there was none."""
        rendezvous, self.open = list(self.open.values()), {}
        for each in rendezvous:
            self.complete(each)
        return bool(rendezvous)
