"""The figures behind the page: everything that it shows of one or several runs, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gossamer.report.prediction import find_topology, predicted
from gossamer.report.runs import KeptRun
from gossamer.results import to_json_data
from gossamer.topology import Topology
from gossamer.topology.draw import positions

FORMAT = 1

MOST_POINTS = 800
"""Points of a curve."""

MOST_PLACED = 1_000
"""Workers beyond which the graph is not drawn."""

AXES = ("steps", "samples", "time", "bytes")

CURVES = ("loss", "train_loss", "accuracy", "worker_accuracy_min", "worker_accuracy_mean", "worker_accuracy_max")

SUMMARY = (
    *("time", "steps", "total_steps", "samples", "loss", "train_loss", "accuracy", "worker_accuracy", "consensus"),
    *("exchanges", "bytes_sent", "utilization", "workers_alive", "wall_s"),
)


def figures(runs: Sequence[KeptRun]) -> dict[str, Any]:
    """Everything the page shows."""
    names = _names(runs)
    shown = [_run(name, kept) for name, kept in zip(names, runs, strict=True)]
    for run in shown:
        run["summary"]["speedup"] = _speedup(shown[0], run)
    document: dict[str, Any] = to_json_data({"format": FORMAT, "axes": list(AXES), "runs": shown})
    return document


def _names(runs: Sequence[KeptRun]) -> list[str]:
    """What the runs are called: by what tells them apart."""
    methods = [str(kept.config.get("method", kept.path.name)) for kept in runs]
    if len(set(methods)) == len(methods):
        return methods
    with_topology = [f"{method}, {kept.config.get('topology')}" for method, kept in zip(methods, runs, strict=True)]
    if len(set(with_topology)) == len(with_topology):
        return with_topology
    folders = [kept.path.resolve() for kept in runs]
    short = [folder.name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _run(name: str, kept: KeptRun) -> dict[str, Any]:
    config, points = kept.config, kept.points
    topology = find_topology(config)
    last = kept.summary or (points[-1] if points else {})
    workers = int(config.get("workers", 0))
    return {
        "name": name,
        "folder": str(kept.path),
        "finished": kept.summary is not None,
        "notes": kept.notes,
        "events": _news(kept),
        "method": config.get("method"),
        "topology": config.get("topology"),
        "task": config.get("task"),
        "num_workers": workers,
        "world": kept.about.get("world"),
        "time_unit": kept.about.get("time_unit", "s"),
        "command": kept.about.get("command", ""),
        "version": kept.about.get("gossamer", ""),
        "started": kept.about.get("started", ""),
        "config": config,
        "goal": int(config.get("steps", 0)),
        "summary": {field: last.get(field) for field in SUMMARY},
        "curves": {name: curve for name in CURVES if (curve := _curve(points, name, workers)) is not None},
        "consensus": _curve(points, "consensus", workers),
        "predicted": predicted(config, topology, points),
        "workers": _workers(kept.recording, topology),
    }


def _news(kept: KeptRun) -> list[Any]:
    if kept.recording is not None and kept.recording["events"]:
        return list(kept.recording["events"])
    return [[None, item] for item in (kept.summary or {}).get("events", [])]


def _value(point: Mapping[str, Any], name: str) -> Any:
    if name.startswith("worker_accuracy_"):
        return (point.get("worker_accuracy") or {}).get(name.rpartition("_")[2])
    return point.get(name)


def _curve(points: Sequence[Mapping[str, Any]], name: str, workers: int) -> dict[str, list[float]] | None:
    """One figure along all axes, where it was taken; None if it never was."""
    seen = [point for point in points if _value(point, name) is not None]
    if not seen:
        return None
    seen = [seen[k] for k in _telling([_value(point, name) for point in seen])]
    return {
        "steps": [point["total_steps"] / max(1, workers) for point in seen],
        "samples": [point["samples"] for point in seen],
        "time": [point["time"] for point in seen],
        "bytes": [point["bytes_sent"] for point in seen],
        "value": [_short(_value(point, name)) for point in seen],
    }


def _telling(values: Sequence[float]) -> list[int]:
    """Which points to keep where there are too many: of each stretch the lowest and the highest, and both ends."""
    if len(values) <= MOST_POINTS:
        return list(range(len(values)))
    array = np.array(values, dtype=np.float64)
    chosen = {0, len(values) - 1}
    for stretch in np.array_split(np.arange(len(values)), MOST_POINTS // 2 - 1):
        chosen |= {int(stretch[np.argmin(array[stretch])]), int(stretch[np.argmax(array[stretch])])}
    return sorted(chosen)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _workers(recording: dict[str, Any] | None, topology: Topology | None) -> dict[str, Any] | None:
    if recording is None:
        return None
    ranks = recording["workers"]
    count = max(ranks, default=0) + 1
    places = None
    if count <= MOST_PLACED:
        whole = topology is not None and topology.workers >= count
        found = positions(topology) if whole and topology is not None else _circle(count)
        places = [[round(float(x), 4), round(float(y), 4)] for x, y in found]
    unused = []
    if places is not None and topology is not None and topology.num_edges <= 4 * MOST_PLACED:
        used = {(a, b) for a, b, *_ in recording["edges"]}
        unused = [[a, b] for a, b in topology.edges.tolist() if (a, b) not in used]
    fields = ("until", "steps", "time", "staleness", "edges", "other_bytes", "timeline")
    return {"ranks": ranks, **{name: recording[name] for name in fields}, "places": places, "unused_edges": unused}


def _circle(count: int) -> list[tuple[float, float]]:
    turn = 2 * math.pi / count
    return [(math.sin(turn * rank), math.cos(turn * rank)) for rank in range(count)]


def _speedup(first: Mapping[str, Any], run: Mapping[str, Any]) -> float | None:
    """How many times more steps a run makes in the same time than the first one."""
    ends = [shown["summary"] for shown in (first, run)]
    if first["time_unit"] != run["time_unit"] or not all(end["time"] and end["total_steps"] for end in ends):
        return None
    paces = [float(end["total_steps"]) / float(end["time"]) for end in ends]
    return paces[1] / paces[0]
