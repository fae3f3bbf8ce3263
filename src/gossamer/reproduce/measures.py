"""What the tables of experiments show of a run: a figure of its summary, with its title and its digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Summary = Mapping[str, Any]
"""The content of a run's summary.json, or the same figures of a prediction."""


@dataclass(frozen=True)
class Measure:
    title: str
    value: Callable[[Summary], float | None]
    format: str

    def text(self, value: float) -> str:
        return format(value, self.format)


def _share(path: str, part: str = "") -> Callable[[Summary], float | None]:
    """Return the function that reads a share, in percent."""

    def read(summary: Summary) -> float | None:
        value = summary.get(path)
        if part and value is not None:
            value = value[part]
        return None if value is None else 100 * value

    return read


def step_ms(summary: Summary) -> float | None:
    return 1000 * summary["time"] / summary["steps"] if summary.get("steps") else None


SPEEDUP = "speedup"
"""The measure that compares a run with that of ``BASELINE``."""

BASELINE = "allreduce"

MEASURES = {
    "accuracy": Measure("accuracy, %", _share("accuracy"), ".1f"),
    "worst_worker": Measure("worst worker, %", _share("worker_accuracy", "min"), ".1f"),
    "best_worker": Measure("best worker, %", _share("worker_accuracy", "max"), ".1f"),
    "loss": Measure("loss", lambda summary: summary.get("loss"), ".3f"),
    "consensus": Measure("consensus", lambda summary: summary.get("consensus"), ".2g"),
    "time": Measure("time, s", lambda summary: summary.get("time"), ".1f"),
    "step_ms": Measure("step, ms", step_ms, ".1f"),
    SPEEDUP: Measure("times as fast as allreduce", lambda summary: summary.get(SPEEDUP), ".1f"),
    "megabytes": Measure("sent per worker and step, MB", lambda summary: summary.get("megabytes"), ".3g"),
}
"""By the name that experiment files use."""
