"""Runs in a line, and what they are compared with: training written out in plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.config import Run, resolve
from gossamer.effects import Update, yields
from gossamer.methods import METHODS, Method
from gossamer.methods.loading.method_contract import declared
from gossamer.tasks import Batches, Task, partition
from gossamer.testing.worlds.quadratic import DIM, quadratic, recording
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.simulation import SimulationResult, simulate

INSTANT = {"clock": "hardware", "compute": "constant:1s", "link": "inf"}
"""Identical machines, and a network that takes no time."""

SYNCHRONOUS = {"divisible": {"period": 1, "delay": 0, "warmup": 0}, "localsgd": {"period": 1}}
"""Settings with which a method comes down to synchronous training."""


def make_run(**values: Any) -> Run:
    (run,) = resolve(values)
    return run


def make_precise_run(**values: Any) -> Run:
    """The run in float64, where rounding does not blur what is compared."""
    task = make_run(**values).task
    images, classes = task.train
    double = dataclasses.replace(
        task,
        model=lambda: task.model().double(),
        train=(images.double(), classes),
        test=(task.test[0].double(), task.test[1]),
    )
    (run,) = resolve(values, task=double)
    return run


def simulated(**values: Any) -> SimulationResult:
    return simulate(make_run(**values))


def cluster_of(**values: Any) -> Cluster:
    return Cluster(make_run(**values))


def batches_of(run: Run) -> list[Batches]:
    """Every worker's mini-batches."""
    c = run.config
    if run.task.own_data:
        parts = [np.array([rank]) for rank in range(c.workers)]
    else:
        parts = partition(c.partition, run.task.labels, len(run.task.train[0]), c.workers, c.seed)
    return [Batches(part, c.batch, c.seed, rank) for rank, part in enumerate(parts)]


def fresh_model(run: Run) -> nn.Module:
    torch.manual_seed(run.config.seed)
    return run.task.model()


def loss_of(run: Run, model: nn.Module, samples: np.ndarray) -> Tensor:
    inputs, targets = (part[samples] for part in run.task.train)
    return run.task.loss(model(run.task.prepare(inputs) if run.task.prepare else inputs), targets)


def train_alone(run: Run, optimizer: Callable[..., torch.optim.Optimizer], steps: int, ranks: Any = None) -> nn.Module:
    """One plain torch model, trained on the joint mini-batches of ``ranks`` (all workers)."""
    batches = batches_of(run)
    ranks = range(len(batches)) if ranks is None else ranks
    model = fresh_model(run)
    opt = optimizer(model.parameters())
    for step in range(steps):
        opt.zero_grad()
        loss_of(run, model, np.concatenate([batches[rank].take(step) for rank in ranks])).backward()
        opt.step()
    return model


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def gradient_at(run: Run, model: nn.Module, x: Tensor, samples: np.ndarray) -> Tensor:
    """The gradient of the loss on ``samples`` at parameters ``x``."""
    nn.utils.vector_to_parameters(x.clone(), model.parameters())
    gradients = torch.autograd.grad(loss_of(run, model, samples), list(model.parameters()))
    return nn.utils.parameters_to_vector(gradients)


@contextmanager
def each_step(name: str, seen: Callable[[Any], None]) -> Iterator[None]:
    """Call ``seen(worker)`` at the end of every step that a worker makes with method ``name``."""
    original = METHODS[name].step

    @yields(*declared(METHODS[name], "step"))
    def step(self: Any, worker: Any) -> Any:
        if original is None:
            yield Update()
        else:
            yield from original(self, worker)
        seen(worker)

    with mock.patch.object(METHODS[name], "step", step):
        yield


def trajectory(run: Run) -> tuple[dict[tuple[int, int], Tensor], SimulationResult]:
    """A run, and every worker's parameters after each of its steps, by (step, rank)."""
    found: dict[tuple[int, int], Tensor] = {}

    def seen(worker: Any) -> None:
        found[worker.step, worker.rank] = worker.x + 0.0

    with each_step(run.config.method, seen):
        return found, simulate(run)


class Precise(nn.Module):
    """w − b in float64, so that invariants can be checked to round-off."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim, dtype=torch.float64))

    def forward(self, b: Tensor) -> Tensor:
        return self.w - b


def precise_task(workers: int, seed: int = 0, dim: int = 3) -> Task:
    """The quadratic in float64."""
    b = torch.from_numpy(np.random.default_rng(seed).standard_normal((workers, dim)))
    return Task(
        name="precise",
        model=lambda: Precise(dim),
        train=(b, torch.zeros(len(b))),
        test=(b, torch.zeros(len(b))),
        loss=lambda differences, targets: 0.5 * differences.square().sum(-1).mean(),
        own_data=True,
        defaults={"batch": 1},
    )


def recording_cluster(**values: Any) -> tuple[Cluster, Tensor]:
    """A cluster on the float64 quadratic, and the sum of everything its optimizers have added so far."""
    task, added = quadratic(values["workers"], values.get("seed", 0)), torch.zeros(DIM, dtype=torch.float64)
    make_optimizer = recording(partial(torch.optim.SGD, lr=0.05, momentum=0.9), added)
    (run,) = resolve(values, task=task, make_optimizer=make_optimizer)
    return Cluster(run), added


def kept_sum(method: Method, workers: Any) -> Tensor:
    """The sum that only the workers' own updates move."""
    return sum((method.conserved(worker) + 0.0 for worker in workers), start=torch.zeros(1, dtype=torch.float64))
