"""The consensus distance that the spectrum of a run's topology predicts.

Without gradients nothing is fitted: the disagreement at the start shrinks as ``topology.disagreement`` says. With them,
the size of what the gradients add is one unknown number: it is chosen so that prediction and run agree on average over
the second half of the run. That it goes with the square of the learning rate, how quickly it piles up, and where it
levels off then comes from the spectrum alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gossamer.config import make_schedule
from gossamer.errors import InputError
from gossamer.methods import METHODS, Method
from gossamer.settings import from_values
from gossamer.topology import Topology, build
from gossamer.topology.disagreement import MAX_TRAJECTORY_WORKERS

GRID = 240
"""Moments for which a prediction is made."""


def find_topology(config: Mapping[str, Any]) -> Topology | None:
    """The topology of a run, if it can still be made: an edge-list file may be gone."""
    try:
        return build(
            config["topology"], workers=config["workers"], seed=config["seed"], nodes=config.get("nodes") or None
        )
    except (KeyError, InputError):
        return None


def predicted(
    config: Mapping[str, Any], topology: Topology | None, points: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]] | None:
    """Time and consensus distance, as predicted; None where the spectrum says nothing."""
    method = _method(config, topology)
    disagreement = method.disagreement() if method is not None else None
    seen = [point for point in points if point.get("consensus") is not None]
    if disagreement is None or topology is None or not 1 < topology.workers <= MAX_TRAJECTORY_WORKERS or len(seen) < 3:
        return None
    steps = np.array([point["total_steps"] / topology.workers for point in seen])
    squares = np.array([point["consensus"] for point in seen]) ** 2
    last = seen[-1]
    if steps[-1] <= 0 or not np.isfinite(squares).all():
        return None
    grid = np.linspace(0.0, steps[-1], GRID + 1)
    schedule = make_schedule(config["schedule"], config["steps"], config["lr_warmup"])
    noise = np.array([schedule(int(step)) ** 2 for step in grid[:-1]])
    left, piled = disagreement.trajectory(grid, noise, _pace(method, last))
    course = squares[0] * left
    if last.get("samples"):
        later = (steps >= steps[-1] / 2) & (squares > 0)
        gained = np.interp(steps[later], grid, piled)
        if not later.any() or not (gained > 0).all():
            return None
        course = course + np.exp(np.mean(np.log(squares[later] / gained))) * piled
    moments = np.interp(grid, steps, [point["time"] for point in seen])
    return {"time": moments.tolist(), "value": np.sqrt(np.maximum(course, 0.0)).tolist()}


def _method(config: Mapping[str, Any], topology: Topology | None) -> Method | None:
    kind = METHODS.get(config.get("method", ""))
    if kind is None or topology is None:
        return None
    return kind(from_values(kind.Config, config), topology)


def _pace(method: Method | None, last: Mapping[str, Any]) -> float:
    """Exchanges that took place, against those that the method wanted."""
    rate = getattr(method, "rate", None)
    if not rate or not last.get("total_steps"):
        return 1.0
    return 2.0 * float(last["exchanges"]) / float(last["total_steps"]) / float(rate)
