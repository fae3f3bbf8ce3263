"""Turns the names that users give to ``gossamer.join`` into a swarm."""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch
from torch import nn

from gossamer.errors import InputError, unknown
from gossamer.methods import find
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.rank_info import find_rank_info
from gossamer.settings import from_values
from gossamer.topology import build

TRANSPORTS = ("gloo", "nccl")


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    method: str = "a2cid2",
    topology: str | nx.Graph = "ring",
    seed: int = 0,
    transport: str = "gloo",
    **settings: Any,
) -> Swarm:
    """``gossamer.join`` for a method that is named; the docstring there has the parameters."""
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    rank_info = find_rank_info()
    method_class = find(method)
    options = method_class.Config.__dataclass_fields__
    for name in settings:
        if name not in options:
            raise InputError(f"{method} has no option {name!r}: expected some of {', '.join(options) or 'none'}")
    graph = build(topology, workers=rank_info.workers, seed=seed)
    instance = method_class(from_values(method_class.Config, settings), graph)
    instance.check_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("LBFGS takes several gradients per step, workers exchange after one: take another optimizer")
    return Swarm(WorkerRuntime(model, optimizer, instance, graph, rank_info, seed, transport))
