"""Averagings and gatherings: workers that meet in one communication of many.

A meeting is open until every worker that is expected has come: every member alive that has not been past this round
already. One that dies is not waited for any more; one that joins is expected from the round on that it starts with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gossamer.effects import Gather, Mean
from gossamer.virtual.sim.virtual_worker import VirtualWorker

Answer = Callable[[Any], None]


class Rendezvous:
    """One round of one topic, and who has come to it."""

    def __init__(self, topic: str, round: int, members: tuple[VirtualWorker, ...]) -> None:
        self.topic, self.round, self.members = topic, round, members
        self.came: dict[int, tuple[VirtualWorker, Mean | Gather, Answer]] = {}
        self.missing = 0
        self.recount()

    def recount(self) -> None:
        """Count who is still expected."""
        self.missing = sum(
            worker.alive and worker.rank not in self.came and worker.contributed.get(self.topic, -1) < self.round
            for worker in self.members
        )

    def add(self, worker: VirtualWorker, effect: Mean | Gather, answer: Answer) -> None:
        # One that joined takes over how far its peer was, so it may come without being waited for.
        expected = worker.rank not in self.came and worker.contributed.get(self.topic, -1) < self.round
        self.came[worker.rank] = (worker, effect, answer)
        worker.contributed[self.topic] = self.round
        self.missing -= expected

    def leave(self, rank: int) -> None:
        """A worker died: what it brought does not count, and it is not waited for."""
        self.came.pop(rank, None)
        self.recount()


class RendezvousTable:
    """All meetings that are open."""

    def __init__(self, workers: list[VirtualWorker], hold: Callable[[Rendezvous], None]) -> None:
        self.workers, self.hold = workers, hold
        self.open: dict[tuple[str, int, tuple[int, ...] | None], Rendezvous] = {}

    def come(self, worker: VirtualWorker, effect: Mean | Gather, answer: Answer) -> None:
        """``worker`` brings its part; the meeting is held once everybody is there."""
        group = effect.group if isinstance(effect, Mean) else None
        key = (effect.topic, effect.round, group)
        meeting = self.open.get(key)
        if meeting is None:
            members = tuple(self.workers) if group is None else tuple(self.workers[rank] for rank in group)
            meeting = self.open[key] = Rendezvous(effect.topic, effect.round, members)
        meeting.add(worker, effect, answer)
        if meeting.missing <= 0:
            del self.open[key]
            self.hold(meeting)

    def changed(self, left: int | None = None) -> None:
        """Somebody left or joined: hold what nobody is waited for any more."""
        for key, meeting in list(self.open.items()):
            if left is None:
                meeting.recount()
            else:
                meeting.leave(left)
            if meeting.missing <= 0:
                del self.open[key]
                if meeting.came:
                    self.hold(meeting)

    def close(self) -> bool:
        """Hold every open meeting with those who have come; False if there was none."""
        meetings, self.open = list(self.open.values()), {}
        for meeting in meetings:
            self.hold(meeting)
        return bool(meetings)
