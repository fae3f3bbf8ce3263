"""Simulation from Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx

from gossamer.config import resolve
from gossamer.errors import InputError
from gossamer.tasks import Task
from gossamer.virtual.simulation import Result, Watch
from gossamer.virtual.simulation import simulate as run_simulation
from gossamer.virtual.updates import MakeOptimizer


def simulate(
    *,
    task: str | Task = "digits",
    topology: str | nx.Graph = "ring",
    optimizer: str | MakeOptimizer = "",
    schedule: str | Callable[[int], float] = "",
    watch: Watch | None = None,
    **settings: Any,
) -> Result:
    """Train one model on virtual workers: real gradients, simulated time.

    task
        The name of a task, the path of a Python file that defines one, or a ``gossamer.tasks.Task``.
    topology
        The name of a topology, the path of an edge list, or a networkx graph of nodes 0 … n−1.
    optimizer
        A name, or a function from parameters to a torch optimizer. Empty: what suits the task and the method.
    schedule
        A name, or a function from the step number to a factor on the learning rate. Empty: what suits the task.
    watch
        Called with every point of the history, the same for each worker, and the news since the last.
    settings
        Any option of ``gossamer simulate`` by its name, such as ``method="a2cid2"``, ``workers=64``, ``lr=0.1``.

    >>> result = simulate(task="quadratic", method="gossip", workers=4, clock="ideal", steps=20)
    >>> result.final.time
    20.0
    """
    values = dict(settings)
    if isinstance(task, str):
        values["task"] = task
    if isinstance(topology, str):
        values["topology"] = topology
    if isinstance(optimizer, str) and optimizer:
        values["optimizer"] = optimizer
    if isinstance(schedule, str) and schedule:
        values["schedule"] = schedule
    runs = resolve(
        values,
        task=None if isinstance(task, str) else task,
        graph=None if isinstance(topology, str) else topology,
        make_optimizer=None if isinstance(optimizer, str) else optimizer,
        schedule=None if isinstance(schedule, str) else schedule,
    )
    if len(runs) > 1:
        raise InputError("simulate trains with one method at a time: call it once for each")
    return run_simulation(runs[0], watch)
