"""What a run yields: points of its history, the same for each worker, as plain data for JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """How a figure is spread over the workers."""

    mean: float | None
    min: float | None
    max: float | None

    @classmethod
    def of(cls, values: list[float] | None) -> Spread:
        if not values:
            return cls(None, None, None)
        return cls(sum(values) / len(values), min(values), max(values))


@dataclass(frozen=True)
class Point:
    """How far a run is at one moment."""

    time: float
    """Simulated: seconds on the hardware clock, expected gradients per worker on the ideal one."""
    steps: int
    """Per worker, on average."""
    total_steps: int
    worker_steps: Spread
    samples: int
    loss: float | None
    """Of the averaged model, on the test set."""
    train_loss: float | None
    """Mean over the mini-batches since the last point."""
    accuracy: float | None
    """Of the averaged model, on the test set."""
    worker_accuracy: Spread
    """Of each worker's own model."""
    consensus: float
    """sqrt(mean_i ‖x_i − x̄‖²)."""
    exchanges: int
    """Swaps of two workers and averagings of many, each counted once."""
    bytes_sent: int
    """By all workers together."""
    utilization: float
    """Share of the workers' time that was not spent waiting."""
    workers_alive: int
    wall_s: float


@dataclass(frozen=True)
class WorkerPoint:
    """How far one worker is at that moment."""

    rank: int
    state: str
    """``training``, ``waiting`` or ``gone``; of real workers ``starting``, ``done`` and ``failed`` too."""
    steps: int
    exchanges: int
    bytes_sent: int
    busy: float
    """Share of its time that it did not spend waiting."""
    accuracy: float | None
    """Of its own model, on the test set; None between two evaluations."""


def to_json_data(value: Any) -> Any:
    """Data as JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {name: to_json_data(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [to_json_data(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
