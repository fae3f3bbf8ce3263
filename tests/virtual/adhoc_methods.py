"""Methods of a few lines, on small vectors, whose answers the tests look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gossamer.config import resolve
from gossamer.effects import MethodGenerator, Update, yields
from gossamer.methods import Method
from gossamer.virtual.sim.cluster import Cluster

RUN = {"task": "quadratic", "dim": 3, "workers": 3, "topology": "complete", "compute": "constant:1s", "link": "inf"}


def make_method(effects: tuple[type, ...], **parts: Callable[..., Any]) -> type[Method]:
    """A method called ``mine`` with these parts. Its generators declare ``effects``; in step, ``Update`` too."""
    generators = {
        name: yields(*effects, *((Update,) if name == "step" else ()))(part)
        if name in ("step", "background", "finish")
        else part
        for name, part in parts.items()
    }
    return type("Mine", (Method,), {"name": "mine", "summary": "for a test", **generators})


def make_cluster(method: type[Method], **values: Any) -> Cluster:
    (run,) = resolve({**RUN, **values}, method=method)
    return Cluster(run)


def run_step(
    effects: tuple[type, ...], step: Callable[..., MethodGenerator], until: float = 1.5, **values: Any
) -> Cluster:
    """Run a cluster with a method that has this step only."""
    cluster = make_cluster(make_method(effects, step=step), **values)
    cluster.run_until(until)
    return cluster


def filled(worker: Any, value: float, size: int = 3) -> torch.Tensor:
    return torch.full((size,), float(value), dtype=worker.x.dtype)
