"""A run at one moment, to be shown while it goes on."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING = "training"
UNUSUAL = ("slow", "silent", "gone", "failed")
"""States of a worker that a person wants to hear of."""


@dataclass(frozen=True)
class WorkerRow:
    """One worker."""

    rank: int
    steps: int
    speed: float
    """Steps per second, or per unit of time."""
    loss: float | None
    exchanges: int
    state: str
    """starting, training, waiting, slow, silent, gone, done, failed."""


@dataclass(frozen=True)
class View:
    """All workers."""

    time: float
    time_unit: str
    wall_s: float
    """How long a person has been waiting."""
    share: float
    """Of the run that is done, 0 to 1."""
    train_loss: float | None
    accuracy: float | None
    consensus: float | None
    rows: list[WorkerRow]

    @property
    def left_s(self) -> float | None:
        """How much longer it will take, if that can be said."""
        return self.wall_s * (1 / self.share - 1) if self.share > 0 and self.wall_s > 0 else None


def state_of(speed: float, speeds: list[float]) -> str:
    """Whether a worker that trains is slow: less than half as fast as most."""
    usual = sorted(speeds)[len(speeds) // 2]
    return "slow" if speed < usual / 2 else TRAINING
