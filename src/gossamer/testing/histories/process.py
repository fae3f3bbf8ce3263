"""A simulated process of a worker, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gossamer.process.liveness.actions import Change
from gossamer.process.liveness.liveness import Liveness
from gossamer.process.liveness.records import Record, Stage
from gossamer.process.views.grouping import Grouping
from gossamer.process.views.view_change import ViewChange
from gossamer.testing.histories.trainer import Trainer


@dataclass(frozen=True)
class Parts:
    """What the simulated workers are made of."""

    liveness: Callable[..., Liveness] = Liveness
    grouping: Callable[..., Grouping] = Grouping
    view_change: Callable[..., ViewChange] = ViewChange
    trainer: Callable[..., Trainer] = Trainer


class Process:
    """One process of a worker."""

    def __init__(self, rank: int, number: int, machine: Liveness, grouping: Grouping) -> None:
        self.rank, self.number, self.machine, self.grouping = rank, number, machine, grouping
        self.views: list[ViewChange] = []
        """One for each purpose."""
        self.trainer: Trainer | None = None
        self.stopped = False
        """By SIGSTOP: what comes meanwhile waits."""
        self.hung = False
        """Its threads that count heartbeats stand still; it still answers."""
        self.resumed_at = float("-inf")
        self.waiting: list[Callable[[], None]] = []
        self.said: dict[int, tuple[Change, int, float]] = {}
        """What was last said about each other worker, about which process of it, and when."""

    def away(self, rank: int) -> bool:
        """Return whether a worker is dead, or in no view with this one since a link is cut."""
        return self.machine.dead(rank) or rank in self.grouping.apart

    def is_done(self, rank: int) -> bool:
        """Whether a worker is done with its training or dead, as this one knows it."""
        record = self.machine.record(rank)
        return self.machine.dead(rank) or (record is not None and record.stage >= Stage.DONE)

    def hear_of_links(self, records: Sequence[Record | None]) -> None:
        """Some workers, perhaps this one, say which others they cannot reach."""
        for record in records:
            if record is not None:
                self.grouping.hear(record.rank, record.unreachable)
        self.grouping.renew()
