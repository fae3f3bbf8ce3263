"""The consensus distance that the spectrum of a run's topology predicts.

Without gradients nothing is fitted: the initial disagreement shrinks as ``topology.disagreement`` says. With gradients,
the variance that they add is one unknown number, chosen so that prediction and run agree on average over the second
half of the run. Its dependence on the square of the learning rate, how quickly it accumulates, and where it levels off
follow from the spectrum alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gossamer.config import make_schedule
from gossamer.errors import InputError
from gossamer.methods import Method, build, find
from gossamer.methods.loading.method_source import is_file
from gossamer.settings import from_values
from gossamer.topology import Topology
from gossamer.topology import build as build_topology
from gossamer.topology.disagreement import MAX_TRAJECTORY_WORKERS

NUM_INTERVALS = 240
"""Intervals between the points of a prediction."""


def find_topology(config: Mapping[str, Any]) -> Topology | None:
    """Build the topology of a run; None if that is not possible any more: its edge-list file may be gone."""
    try:
        return build_topology(
            config["topology"], workers=config["workers"], seed=config["seed"], nodes=config.get("nodes") or None
        )
    except (KeyError, InputError):
        return None


def predict_consensus(
    config: Mapping[str, Any], topology: Topology | None, points: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]] | None:
    """Return times and predicted consensus distances; None where the spectrum predicts nothing."""
    method = _method(config, topology)
    disagreement = method.disagreement() if method is not None else None
    measured = [point for point in points if point.get("consensus") is not None]
    # The learning-rate schedule of a loop of one's own is unknown.
    if disagreement is None or topology is None or len(measured) < 3 or "schedule" not in config:
        return None
    steps = np.array([point["total_steps"] / topology.workers for point in measured])
    squares = np.array([point["consensus"] for point in measured]) ** 2
    last = measured[-1]
    if not 1 < topology.workers <= MAX_TRAJECTORY_WORKERS or steps[-1] <= 0 or not np.isfinite(squares).all():
        return None
    grid = np.linspace(0.0, steps[-1], NUM_INTERVALS + 1)
    schedule = make_schedule(config["schedule"], config["steps"], config["lr_warmup"])
    noise = np.array([schedule(int(step)) ** 2 for step in grid[:-1]])
    remaining, accumulated = disagreement.trajectory(grid, noise, _rate_scale(method, last))
    trajectory = squares[0] * remaining
    if last.get("samples"):
        second_half = (steps >= steps[-1] / 2) & (squares > 0)
        unit_noise = np.interp(steps[second_half], grid, accumulated)
        if not second_half.any() or not (unit_noise > 0).all():
            return None
        trajectory = trajectory + np.exp(np.mean(np.log(squares[second_half] / unit_noise))) * accumulated
    times = np.interp(grid, steps, [point["time"] for point in measured])
    return {"time": times.tolist(), "value": np.sqrt(np.maximum(trajectory, 0.0)).tolist()}


def _method(config: Mapping[str, Any], topology: Topology | None) -> Method | None:
    spec = str(config.get("method", ""))
    # A report reads data: it does not run the file that a run's method came from.
    if topology is None or is_file(spec):
        return None
    try:
        kind = find(spec)
        return build(kind, from_values(kind.Config, config), topology)
    except InputError:
        return None


def _rate_scale(method: Method | None, last: Mapping[str, Any]) -> float:
    rate = getattr(method, "rate", None)
    if not rate or not last.get("total_steps"):
        return 1.0
    return 2.0 * float(last["exchanges"]) / float(last["total_steps"]) / float(rate)
