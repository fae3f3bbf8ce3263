"""What a run reports: points of its history, for all workers together and for each one, and their form in JSON.

Both worlds report the same quantities. Times of the virtual world are simulated: seconds on the hardware clock,
expected gradients per worker on the ideal clock. Times of real workers are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Mean, minimum and maximum of a quantity over the workers; None if no worker has a value."""

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
    """The state of a run at one moment. All counts are totals since the start of the run."""

    time: float
    """Time since the start of the run."""
    steps: int
    """Optimizer steps per worker: ``total_steps`` divided by the number of workers, rounded."""
    total_steps: int
    """Optimizer steps of all workers together."""
    worker_steps: Spread
    """Optimizer steps of single workers."""
    samples: int
    """Training samples that all workers together have computed gradients of."""
    loss: float | None
    """Loss of the averaged model on the test set; None between two evaluations."""
    train_loss: float | None
    """Mean training loss of all mini-batches since the last point; None if there was none."""
    accuracy: float | None
    """Accuracy of the averaged model on the test set; None between two evaluations."""
    worker_accuracy: Spread
    """Accuracy of each worker's own model on the test set."""
    consensus: float
    """Consensus distance: sqrt(mean_i ‖x_i − x̄‖²) over the workers alive."""
    exchanges: int
    """Exchanges of two workers and collectives of many, each counted once, however many workers took part."""
    bytes_sent: int
    """Bytes sent by all workers together."""
    utilization: float
    """Share of the workers' time that they did not spend waiting, 0 to 1."""
    workers_alive: int
    """Number of workers alive."""
    wall_s: float
    """Seconds that the run has taken so far on the machine that runs it."""


@dataclass(frozen=True)
class WorkerPoint:
    """The state of one worker at the same moment. All counts are totals since the start of the run."""

    rank: int
    """The number of the worker, from 0."""
    state: str
    """``training``, ``waiting`` or ``gone``; for real workers also ``starting``, ``done`` and ``failed``."""
    steps: int
    """Optimizer steps of this worker."""
    exchanges: int
    """Exchanges and collectives in which this worker took part."""
    bytes_sent: int
    """Bytes sent by this worker."""
    busy: float
    """Share of its time that this worker did not spend waiting, 0 to 1."""
    accuracy: float | None
    """Accuracy of its own model on the test set; None between two evaluations."""
    logged: dict[str, float | None] = field(default_factory=dict)
    """The newest values that a loop of one's own has logged under other names (``Swarm.log``)."""


def to_json_data(value: Any) -> Any:
    """Return ``value`` with every number that is not finite replaced by None, which JSON can hold."""
    if isinstance(value, dict):
        return {name: to_json_data(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [to_json_data(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
