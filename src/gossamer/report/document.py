"""Everything that the page shows of one or several runs, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gossamer.recording import KINDS
from gossamer.recording.timeline import pack, unpack
from gossamer.report.headline import find_targets, headline
from gossamer.report.prediction import find_topology, predict_consensus
from gossamer.report.runs import StoredRun
from gossamer.report.summary import COLUMNS, cells, speedup, time_meaning
from gossamer.results import to_json_data
from gossamer.topology import Topology
from gossamer.topology.draw import circle, positions

FORMAT = 2

MAX_POINTS, MAX_ALL_POINTS = 1_600, 4_800
"""Points of the history of one run, and of all runs together: they bound the size of the page."""

MAX_CELLS = 1 << 16
"""Cells of the time lines of all runs together, for one kind of activity."""

MAX_ROWS = 64
"""Rows of one time line; of more workers, neighbouring ranks share a row."""

MIN_COLUMNS, MAX_MIXED_COLUMNS, MAX_COLUMNS = 64, 160, 512
DISTINCT_STEPS = 64
"""Up to this many steps per worker a time line can show them one by one; beyond, wide columns show their mixture."""

MAX_DRAWN_WORKERS = 1_000
"""Workers beyond which the graph is not drawn."""

AXES = {"steps": "total_steps", "samples": "samples", "time": "time", "bytes": "bytes_sent"}
"""Horizontal axes of the curves, and the fields of a point that they show."""

CURVES = (
    *("loss", "train_loss", "accuracy", "worker_accuracy_min", "worker_accuracy_mean", "worker_accuracy_max"),
    "consensus",
)

SUMMARY = (
    *("time", "steps", "total_steps", "samples", "loss", "train_loss", "accuracy", "worker_accuracy", "consensus"),
    *("exchanges", "bytes_sent", "utilization", "workers_alive", "wall_s"),
)


def report_document(runs: Sequence[StoredRun]) -> dict[str, Any]:
    names = _names(runs)
    max_points = min(MAX_POINTS, MAX_ALL_POINTS // len(runs))
    num_rows = sum(min(MAX_ROWS, len(run.recording["workers"])) for run in runs if run.recording is not None)
    max_columns = int(np.clip(MAX_CELLS // max(1, num_rows), MIN_COLUMNS, MAX_COLUMNS))
    shown = []
    for name, run in zip(names, runs, strict=True):
        topology = find_topology(run.config)
        against_first = _speedup(runs[0], run) if len(runs) > 1 else None
        shown.append(
            {
                "name": name,
                **_description(run),
                "summary": {**{field: run.final.get(field) for field in SUMMARY}, "speedup": against_first},
                "cells": cells(run.final, run.time_unit, against_first),
                **_curves(run, topology, max_points),
                "workers": _workers(run, topology, max_columns),
            }
        )
    targets = find_targets(runs)
    clock = time_meaning({run.about.get("world", "") for run in runs}, {run.time_unit for run in runs})
    document: dict[str, Any] = to_json_data(
        {
            "format": FORMAT,
            "headline": headline(names, runs, targets),
            # A loop of one's own does not say how many samples it has seen.
            "axes": [axis for axis in AXES if axis != "samples" or any(run.final.get("samples") for run in runs)],
            "columns": {name: meaning.format(time=clock, first=names[0]) for name, meaning in COLUMNS.items()},
            "targets": None if targets is None else targets.document(),
            "runs": shown,
        }
    )
    return document


def _names(runs: Sequence[StoredRun]) -> list[str]:
    """Name the runs by what distinguishes them: method, topology or folder."""
    methods = [run.method for run in runs]
    if len(set(methods)) == len(methods):
        return methods
    with_topology = [f"{method}, {run.config.get('topology')}" for method, run in zip(methods, runs, strict=True)]
    if len(set(with_topology)) == len(with_topology):
        return with_topology
    folders = [run.path.resolve() for run in runs]
    short = [folder.name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _description(run: StoredRun) -> dict[str, Any]:
    config, about = run.config, run.about
    events: list[Any] = [[None, event] for event in (run.summary or {}).get("events", [])]
    if run.recording is not None and run.recording["events"]:
        # These have times.
        events = run.recording["events"]
    return {
        "folder": str(run.path),
        "finished": run.finished,
        "notes": run.notes,
        "events": events,
        "method": run.method,
        "topology": config.get("topology"),
        "task": config.get("task"),
        "num_workers": int(config.get("workers", 0)),
        "replica_size": int(config.get("replica_size", 1)),
        "world": about.get("world"),
        "time_unit": run.time_unit,
        "command": about.get("command", ""),
        "version": about.get("gossamer", ""),
        "started": about.get("started", ""),
        "config": config,
        "goal": int(config.get("steps", 0)),
    }


def _speedup(first: StoredRun, run: StoredRun) -> float | None:
    if first.problem or run.problem or first.time_unit != run.time_unit:
        return None
    return speedup(first.final, run.final)


# Curves


def _curves(run: StoredRun, topology: Topology | None, max_points: int) -> dict[str, Any]:
    """The positions of the shown points on all axes, and the values of the curves there, None where not evaluated."""
    all_values = {name: np.array([_value(point, name) for point in run.points], dtype=np.float64) for name in CURVES}
    all_values = {name: values for name, values in all_values.items() if not np.isnan(values).all()}
    shown = _extreme_points(list(all_values.values()), len(run.points), max_points)
    points = [run.points[k] for k in shown]
    axes = {axis: [_rounded(point[field]) for point in points] for axis, field in AXES.items()}
    workers = max(1, int(run.config.get("workers", 0)))
    axes["steps"] = [_rounded(point["total_steps"] / workers) for point in points]
    predicted = predict_consensus(run.config, topology, run.points)
    return {
        "points": axes,
        "curves": {
            name: [None if math.isnan(value) else _rounded(value) for value in values[shown].tolist()]
            for name, values in all_values.items()
        },
        "predicted": predicted and {name: list(map(_rounded, values)) for name, values in predicted.items()},
    }


def _value(point: Mapping[str, Any], name: str) -> float | None:
    """The value of a curve at a point; None where it was not evaluated."""
    if name.startswith("worker_accuracy_"):
        return (point.get("worker_accuracy") or {}).get(name.rpartition("_")[2])
    return point.get(name)


def _extreme_points(curves: Sequence[np.ndarray], num_points: int, max_points: int) -> list[int]:
    """Choose points where there are too many: of each stretch the minimum and maximum of each curve, and both ends."""
    if num_points <= max_points:
        return list(range(num_points))
    chosen = {0, num_points - 1}
    for stretch in np.array_split(np.arange(num_points), max_points // (2 * len(curves)) - 1):
        for values in (curve[stretch] for curve in curves):
            if not np.isnan(values).all():
                chosen |= {int(stretch[np.nanargmin(values)]), int(stretch[np.nanargmax(values)])}
    return sorted(chosen)


def _rounded(value: float) -> float:
    """Six digits: more than a picture can show, in a third of the characters."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


# Workers


def _workers(run: StoredRun, topology: Topology | None, max_columns: int) -> dict[str, Any] | None:
    """What the workers did; None if that was not recorded."""
    recording = run.recording
    if recording is None:
        return None
    ranks = recording["workers"]
    num_workers = max(ranks, default=0) + 1
    drawn_at = None
    if num_workers <= MAX_DRAWN_WORKERS:
        complete = topology is not None and topology.workers >= num_workers
        where = positions(topology) if complete and topology is not None else circle(num_workers)
        drawn_at = [[round(float(x), 4), round(float(y), 4)] for x, y in where]
    unused_edges = []
    if drawn_at is not None and topology is not None and topology.num_edges <= 4 * MAX_DRAWN_WORKERS:
        used = {(a, b) for a, b, *_ in recording["edges"]}
        unused_edges = [[a, b] for a, b in topology.edges.tolist() if (a, b) not in used]
    fields = ("until", "steps", "time", "staleness", "edges", "other_bytes")
    return {
        "ranks": ranks,
        **{name: recording[name] for name in fields},
        "timeline": _timeline(recording, max_columns),
        "of_replicas": _ranks(run),
        "positions": drawn_at,
        "unused_edges": unused_edges,
    }


def _ranks(run: StoredRun) -> list[dict[str, Any]]:
    """All ranks of all replicas, in order; empty if workers are one rank each."""
    recording = run.recording
    if not run.ranks or recording is None:
        return []
    first = [
        {"worker": worker, "rank": 0, "steps": recording["steps"][row],
         "time": {kind: recording["time"][kind][row] for kind in KINDS}}
        for row, worker in enumerate(recording["workers"])
    ]  # fmt: skip
    return sorted([*first, *run.ranks], key=lambda row: (row["worker"], row["rank"]))


def _timeline(recording: dict[str, Any], max_columns: int) -> dict[str, Any]:
    """The time line in as many rows and columns as the page has room for, as means over workers and bins."""
    ranks, bins = recording["workers"], recording["timeline"]["bins"]
    if max(recording["steps"], default=0) > DISTINCT_STEPS:
        max_columns = min(max_columns, MAX_MIXED_COLUMNS)
    bins_per_column = math.ceil(bins / max_columns)
    first_bins = np.arange(0, bins, bins_per_column)
    rows = np.array_split(np.arange(len(ranks)), min(MAX_ROWS, len(ranks)))
    shares = {}
    for kind in KINDS:
        sums = np.add.reduceat(unpack(recording, kind).astype(np.float64), first_bins, axis=1)
        columns = sums / np.diff([*first_bins, bins])
        shares[kind] = pack(np.stack([columns[row].mean(axis=0) for row in rows]))
    return {
        "width": recording["timeline"]["width"] * bins_per_column,
        "columns": len(first_bins),
        "rows": [[ranks[row[0]], ranks[row[-1]]] for row in rows],
        "shares": shares,
    }
