"""What Python programs call: simulating, and joining the workers of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn

from gossamer.config import resolve
from gossamer.errors import InputError
from gossamer.plan.auto import AUTO, choose_for_loop
from gossamer.process.runtime.join import join as join_workers
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.store.rank_info import find_rank_info
from gossamer.tasks import Task
from gossamer.virtual.compute.optimizers import MakeOptimizer
from gossamer.virtual.simulation import PointCallback, SimulationResult
from gossamer.virtual.simulation import simulate as run_simulation


def simulate(
    *,
    task: str | Task = "digits",
    topology: str | nx.Graph = "ring",
    optimizer: str | MakeOptimizer = "",
    schedule: str | Callable[[int], float] = "",
    callback: PointCallback | None = None,
    **settings: Any,
) -> SimulationResult:
    """Train one model on virtual workers: real gradients, simulated time.

    task
        The name of a task, the path of a Python file that defines one, or a ``gossamer.tasks.Task``.
    topology
        The name of a topology, the path of an edge list, or a networkx graph of nodes 0 … n−1.
    optimizer
        A name, or a function from parameters to a torch optimizer. Empty: what suits the task and the method.
    schedule
        A name, or a function from the step number to a factor on the learning rate. Empty: what suits the task.
    callback
        Called with every point of the history, the same for each worker, and the events since the last.
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
    return run_simulation(runs[0], callback)


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    method: str = "a2cid2",
    topology: str | nx.Graph = "ring",
    seed: int = 0,
    transport: str = "gloo",
    loss: Callable[[], Tensor] | None = None,
    **settings: Any,
) -> Swarm:
    """Train ``model`` together with the other workers of this job, started with torchrun as any PyTorch job.

    The loop stays as it was, ``optimizer.step()`` included::

        swarm = gossamer.join(model, optimizer, method="a2cid2", topology="ring")
        for x, y in loader:
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        swarm.finish()             # identical, averaged weights everywhere

    method, topology
        Names as in ``gossamer methods`` and ``gossamer topology``; a topology may also be a networkx graph. The method
        ``auto`` measures the workers for some seconds, plans, and takes the winner and its topology; ``swarm.events``
        says which.
    seed
        The same on all workers.
    transport
        What carries averages over more than two workers: ``gloo``, through host memory, or ``nccl``, from GPU to GPU,
        where each worker has one to itself. Exchanges in pairs always go through host memory.
    loss
        For ``auto``: a function that returns the loss of one mini-batch, such as ``lambda: loss_fn(model(x), y)``, to
        time a step with. The model and the optimizer are put back as they were.
    settings
        Options of the method by name, such as ``rate=2``.
    """
    if method != AUTO:
        return join_workers(
            model, optimizer, method=method, topology=topology, seed=seed, transport=transport, **settings
        )
    if loss is None:
        raise InputError(
            "method auto has to time a step: give the loss of one mini-batch, as loss=lambda: loss_fn(model(x), y)"
        )
    if settings or topology != "ring":
        raise InputError("method auto chooses the topology and the options too: leave them out, or name a method")
    choice, chosen = choose_for_loop(find_rank_info(), model, optimizer, loss)
    swarm = join_workers(model, optimizer, seed=seed, transport=transport, **chosen)
    swarm.events.append(f"auto: {choice.verdict}")
    return swarm
