"""A run's figures for experiment trackers: one dictionary of numbers per point of the history.

A tracker is a function ``track(step, scalars)``. ``TensorBoard`` is one; a Python file that defines such a function
makes another::

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
from gossamer.user_file import blaming, execute, importable

Tracker = Callable[[int, dict[str, float]], None]
"""Called with the number of steps, per worker on average, and the figures by name."""

EXPECTED = "expected `def track(step: int, scalars: dict[str, float])`"


def scalars(point: Point, workers: Sequence[WorkerPoint]) -> dict[str, float]:
    """Return all figures of a point by name: ``loss``, …, ``busy/mean``, ``busy/worker_0``, …; without missing ones."""
    by_name: dict[str, float] = {}
    for name, value in asdict(point).items():
        if isinstance(value, Mapping):
            by_name |= {f"{name}/{part}": number for part, number in value.items() if _is_number(number)}
        elif _is_number(value):
            by_name[name] = value
    rows = [{**worker.logged, **asdict(worker)} for worker in workers]
    for name in dict.fromkeys(name for row in rows for name in row):
        values = {row["rank"]: float(row[name]) for row in rows if name != "rank" and _is_number(row.get(name))}
        if values:
            group = f"worker_{name}" if name in by_name else name
            by_name[f"{group}/mean"] = math.fsum(values.values()) / len(values)
            by_name |= {f"{group}/worker_{rank}": value for rank, value in values.items()}
    return by_name


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def load_tracker(spec: str) -> Tracker:
    """Return the function ``track`` that the Python file ``spec`` defines."""
    path = Path(spec)
    if not path.is_file():
        raise InputError(f"--tracker {spec} does not exist: expected a Python file that defines `track`")
    with blaming(path), importable(path.resolve().parent):
        users_track = getattr(execute(path), "track", None)
    if not callable(users_track):
        raise InputError(f"--tracker {spec} defines no `track`: {EXPECTED}")

    def track(step: int, scalars: dict[str, float]) -> None:
        with blaming(path):
            users_track(step, scalars)

    return track


class TensorBoard:
    """A tracker that writes event files for TensorBoard into a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise InputError(
                "--tensorboard needs TensorBoard, which is not installed: pip install tensorboard"
            ) from None
        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise InputError(
                f"--tensorboard {folder} cannot be written to: {error.strerror}; give a folder you may write to"
            ) from None

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
