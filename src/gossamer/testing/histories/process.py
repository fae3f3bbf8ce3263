"""A simulated process of a worker, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gossamer.process.liveness.actions import Change
from gossamer.process.liveness.liveness import Liveness
from gossamer.process.views.view_change import ViewChange
from gossamer.testing.histories.trainer import Trainer


@dataclass(frozen=True)
class Parts:
    """What the simulated workers are made of."""

    liveness: Callable[..., Liveness] = Liveness
    view_change: Callable[..., ViewChange] = ViewChange
    trainer: Callable[..., Trainer] = Trainer


class Process:
    """One process of a worker."""

    def __init__(self, rank: int, number: int, machine: Liveness) -> None:
        self.rank, self.number, self.machine = rank, number, machine
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
