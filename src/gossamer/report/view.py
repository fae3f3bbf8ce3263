"""The state of a run at one moment, for the terminal."""

from __future__ import annotations

from dataclasses import dataclass

TRAINING = "training"
UNUSUAL = ("slow", "silent", "gone", "failed")
"""States of a worker that people want to know of."""


@dataclass(frozen=True)
class WorkerRow:
    rank: int
    steps: int
    speed: float
    """Steps per second, or per unit of the ideal clock."""
    train_loss: float | None
    """Mean over its newest mini-batches."""
    exchanges: int
    state: str
    """starting, training, waiting, slow, silent, gone, done, failed."""


@dataclass(frozen=True)
class View:
    """The state of a run. Fields mean what the fields of ``results.Point`` with the same names mean."""

    time: float
    time_unit: str
    wall_s: float
    """Seconds since the command was started."""
    share: float
    """Of the steps that are done, 0 to 1."""
    train_loss: float | None
    accuracy: float | None
    consensus: float | None
    rows: list[WorkerRow]
    worker_accuracy: float | None = None
    """Mean over the workers' own models: what real workers know before their models are averaged at the end."""

    @property
    def left_s(self) -> float | None:
        """Estimated seconds to the end; None if there is nothing to estimate from."""
        return self.wall_s * (1 / self.share - 1) if self.share > 0 and self.wall_s > 0 else None


def states_of(speeds: list[float]) -> list[str]:
    """Return ``slow`` for each worker that is less than half as fast as the median, ``training`` for the others."""
    median = sorted(speeds)[len(speeds) // 2]
    return ["slow" if speed < median / 2 else TRAINING for speed in speeds]
