"""From the names that a user gives to a swarm."""

from __future__ import annotations

from typing import Any

import networkx as nx
import torch
from torch import nn

from gossamer.errors import InputError, unknown
from gossamer.methods import find
from gossamer.process.runtime.swarm import Swarm
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
    """What the public ``gossamer.join`` does for a method that is named; its docstring has the parameters."""
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    rank_info = find_rank_info()
    kind = find(method)
    known = kind.Config.__dataclass_fields__
    for name in settings:
        if name not in known:
            raise InputError(f"{method} has no option {name!r}: expected some of {', '.join(known) or 'none'}")
    graph = build(topology, workers=rank_info.workers, seed=seed)
    made = kind(from_values(kind.Config, settings), graph)
    made.check_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError("LBFGS takes several gradients per step, workers exchange after one: take another optimizer")
    return Swarm(model, optimizer, made, graph, rank_info, seed, transport)
