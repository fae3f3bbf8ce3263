"""Runs of the method under test in the virtual cluster."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.config import resolve
from gossamer.effects import MethodGenerator, Update, yields
from gossamer.methods import Method
from gossamer.methods.loading.method_contract import declared
from gossamer.tasks import Task
from gossamer.testing.subject import Subject
from gossamer.testing.worlds.quadratic import DIM, quadratic, recording
from gossamer.virtual.sim.cluster import Cluster

INSTANT: dict[str, Any] = {"compute": "constant:1s", "link": "inf"}
"""Identical machines, and a network that takes no time."""

UNEVEN: dict[str, Any] = {"compute": "exponential:1s", "straggler": "1:3", "link": "48b/100ms"}
"""Uneven machines and a slow network."""

GRAPHS = ("ring", "complete", "star", "base")


@dataclass(frozen=True)
class Machines:
    """A cluster to run on: any kind, slow and uneven."""

    graph: str
    workers: int
    seed: int
    hardware: dict[str, Any]

    def __str__(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.hardware.items())
        return f"{self.workers} workers, topology={self.graph} seed={self.seed} {settings}"


def draw_machines(subject: Subject, seed: int) -> Machines:
    """Draw a cluster on which the method can work."""
    rng = random.Random(seed)
    graph, workers = rng.choice(GRAPHS), rng.randint(1, 7)
    graph, workers = subject.first_fit((graph, workers), ("ring", workers), ("ring", 4), ("ring", 2))
    hardware: dict[str, Any] = {
        "compute": rng.choice(["constant:1s", "lognormal:1s,0.5", "exponential:1s"]),
        "straggler": f"{rng.randrange(workers)}:{rng.choice([0.3, 1, 2.7, 6.1])}",
        "link": rng.choice(["inf", "1kb/0ms", "48b/100ms", "10b/2s"]),
        "clock": rng.choice(["hardware", "hardware", "ideal"]),
    }
    return Machines(graph, workers, seed, hardware)


def make_cluster(
    subject: Subject,
    graph: str,
    workers: int,
    *,
    method: Method | None = None,
    task: Task | None = None,
    lr: float = 0.05,
    momentum: float = 0.9,
    added: Tensor | None = None,
    seed: int = 0,
    **settings: Any,
) -> Cluster:
    """Return a cluster before its first step; its optimizers add to ``added`` what they add to the models."""
    make_optimizer = partial(subject.make_optimizer, lr=lr, momentum=momentum)
    (run,) = resolve(
        {"workers": workers, "seed": seed, **settings},
        method=method or subject.build(graph, workers, seed),
        task=task or quadratic(workers, seed),
        make_optimizer=make_optimizer if added is None else recording(make_optimizer, added),
    )
    return Cluster(run)


def on(machines: Machines, subject: Subject, **settings: Any) -> Cluster:
    return make_cluster(
        subject, machines.graph, machines.workers, seed=machines.seed, **{**machines.hardware, **settings}
    )


def zeros() -> Tensor:
    return torch.zeros(DIM, dtype=torch.float64)


def total(cluster: Cluster) -> Tensor:
    """Return the sum that only the workers' own updates move."""
    return sum((cluster.method.conserved(worker) + 0.0 for worker in cluster.workers), start=zeros())


def models(cluster: Cluster) -> Tensor:
    """Return a copy of the models of all workers alive, one per row."""
    return cluster.replicas.rows()[cluster.alive()].clone()


def watch_steps(method: Method, seen: Callable[[Any], None]) -> Method:
    """Let ``method`` call ``seen(worker)`` at the end of every step."""
    inner = method.step

    @yields(*declared(method, "step"))
    def step(worker: Any) -> MethodGenerator:
        if inner is None:
            yield Update()
        else:
            yield from inner(worker)
        seen(worker)

    method.step = step
    return method


def steps_of(cluster: Cluster) -> Iterator[int]:
    return (worker.steps_done for worker in cluster.workers)
