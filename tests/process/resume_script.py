"""One worker that trains in one go, and again with a stop in the middle from which it goes on."""

from __future__ import annotations

import copy
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from gossamer.api import join
from gossamer.process.runtime.swarm import Swarm


def model_and_optimizer(method: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    if method == "divisible":
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def advance(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * rank + step)
        inputs = torch.randn(8, 6, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :2]).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[float]:
    return torch.cat([value.flatten().float() for value in model.state_dict().values()]).tolist()


def fail_once(swarm: Swarm) -> None:
    """Let the first connection for the end of the run not come about."""
    build = swarm._runtime.groups.finish._group

    def fails(*arguments: Any) -> Any:
        swarm._runtime.groups.finish._group = build  # type: ignore[method-assign]
        raise RuntimeError("the connection was lost")

    swarm._runtime.groups.finish._group = fails  # type: ignore[method-assign]


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    method, half, whole = order["method"], order["half"], order["whole"]

    def joined(model: nn.Module, optimizer: torch.optim.Optimizer) -> Swarm:
        return join(model, optimizer, method=method, **order.get("settings", {}))

    events: list[str] = []
    model, optimizer = model_and_optimizer(method)
    with joined(model, optimizer) as swarm:
        advance(rank, model, optimizer, range(whole))
    in_one_go = weights(model)
    events += map(str, swarm.events)

    model, optimizer = model_and_optimizer(method)
    swarm = joined(model, optimizer)
    advance(rank, model, optimizer, range(half))
    state, moments = swarm.state_dict(), copy.deepcopy(optimizer.state_dict())
    swarm.finish()
    events += map(str, swarm.events)

    model, optimizer = model_and_optimizer(method)
    with joined(model, optimizer) as swarm:
        optimizer.load_state_dict(moments)
        swarm.load_state_dict(state)
        advance(rank, model, optimizer, range(half, whole))
        if rank == order.get("stumbles"):
            fail_once(swarm)
    events += map(str, swarm.events)
    in_flight = sorted(state["in_flight"])
    out.send(
        {"at": "finished", "in_one_go": in_one_go, "resumed": weights(model), "in_flight": in_flight, "events": events}
    )


def average_apart(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Go on from a state in which the workers have merged different numbers of averages."""
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    model, optimizer = model_and_optimizer("lasgd")
    with join(model, optimizer, method="lasgd") as swarm:
        state = swarm.state_dict()
        swarm.load_state_dict({**state, "scalars": {**state["scalars"], "merges": 5 + rank}})
        step = 0
        while swarm.metrics().exchanges < 2:
            advance(rank, model, optimizer, range(step, step + 1))
            step += 1
            time.sleep(0.001)
        exchanges = swarm.metrics().exchanges
    out.send({"at": "finished", "exchanges": exchanges, "events": list(map(str, swarm.events))})
