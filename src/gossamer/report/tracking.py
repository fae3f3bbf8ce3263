"""A run's figures for experiment trackers: one dictionary of numbers per point of the history.

A tracker is a function ``track(step, scalars)``. TensorBoard's is in ``tensorboard``; for any other, a Python file that
defines one is enough::

    import wandb
    wandb.init(project="gossamer")

    def track(step, scalars):
        wandb.log(scalars, step=step)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gossamer.errors import InputError
from gossamer.results import Point, WorkerPoint
from gossamer.tasks.userfile import blaming, execute, importable

Tracker = Callable[[int, dict[str, float]], None]
"""Called with the number of steps, per worker on average, and the figures by name."""

EXPECTED = "expected `def track(step: int, scalars: dict[str, float])`"


def scalars(point: Point, workers: Sequence[WorkerPoint]) -> dict[str, float]:
    """All figures of a point by name: ``loss``, …, ``busy/mean``, ``busy/worker_0``, …, as far as there are any."""
    found: dict[str, float] = {}
    for name, value in asdict(point).items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{part}": number for part, number in value.items() if _is_number(number)}
        elif _is_number(value):
            found[name] = value
    rows = [asdict(worker) for worker in workers]
    for name in rows[0] if rows else ():
        values = {row["rank"]: float(row[name]) for row in rows if name != "rank" and _is_number(row[name])}
        if values:
            group = f"worker_{name}" if name in found else name
            found[f"{group}/mean"] = math.fsum(values.values()) / len(values)
            found |= {f"{group}/worker_{rank}": value for rank, value in values.items()}
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def load_tracker(spec: str) -> Tracker:
    """The function ``track`` that the Python file ``spec`` defines."""
    path = Path(spec)
    if not path.is_file():
        raise InputError(f"--tracker {spec} does not exist: expected a Python file that defines `track`")
    with blaming(path), importable(path.resolve().parent):
        found = getattr(execute(path), "track", None)
    if not callable(found):
        raise InputError(f"--tracker {spec} defines no `track`: {EXPECTED}")

    def track(step: int, scalars: dict[str, float]) -> None:
        with blaming(path):
            found(step, scalars)

    return track
