"""The columns that summarise a run, from fields of the JSON: the terminal's table and the page show the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gossamer.report.formats import NOTHING, figure, percent, run_time, size

COLUMNS = {
    "time": "{time}",
    "speed-up": "steps per time, against {first}",
    "steps": "per worker, on average",
    "loss": "of the averaged model on the test set",
    "accuracy": "of the averaged model on the test set",
    "workers": "lowest and highest accuracy of the workers' own models",
    "consensus": "root mean square distance of the workers' models from their mean",
    "exchanges": "pairwise exchanges and collectives, each counted once",
    "sent": "by all workers together",
    "busy": "share of the workers' time that was not spent waiting",
}
"""The columns and what they mean; ``{time}`` and ``{first}`` stand for the clock and the first run of the table."""


def cells(final: Mapping[str, Any], time_unit: str, speedup: float | None) -> dict[str, str]:
    """One row of the summary. ``final``: the last point of a run under the names of the JSON (``results.Point``)."""
    accuracy = final.get("worker_accuracy") or {}
    steps, exchanges = final.get("steps"), final.get("exchanges")
    return {
        "time": run_time(final.get("time"), time_unit),
        "speed-up": NOTHING if speedup is None else f"{speedup:.2f}×",
        "steps": NOTHING if steps is None else str(steps),
        "loss": figure(final.get("loss")),
        "accuracy": percent(final.get("accuracy")),
        "workers": _range(accuracy.get("min"), accuracy.get("max")),
        "consensus": figure(final.get("consensus")),
        "exchanges": NOTHING if exchanges is None else str(exchanges),
        "sent": size(final.get("bytes_sent")),
        "busy": percent(final.get("utilization"), digits=0),
    }


def time_meaning(worlds: set[str], time_units: set[str]) -> str:
    """What the column ``time`` counts."""
    if "s" not in time_units:
        return "expected gradients per worker"
    kinds = {"virtual": "simulated", "process": "real"}
    seconds = " and ".join(sorted(kinds.get(world, world) for world in worlds)) + " seconds"
    return seconds if len(time_units) == 1 else f"{seconds}, or expected gradients per worker"


def speedup(first: Mapping[str, Any], final: Mapping[str, Any]) -> float | None:
    """Return how many times more steps per time a run makes than the first one; None if one of them made none."""
    if not all(point.get("time") and point.get("total_steps") for point in (first, final)):
        return None
    return float((final["total_steps"] / final["time"]) / (first["total_steps"] / first["time"]))


def _range(lowest: float | None, highest: float | None) -> str:
    if lowest is None or highest is None:
        return NOTHING
    ends = percent(lowest), percent(highest)
    return ends[0] if ends[0] == ends[1] else f"{ends[0].removesuffix('%')}–{ends[1]}"
