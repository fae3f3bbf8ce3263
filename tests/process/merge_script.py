"""One worker whose next background mean is over before it applies the last one."""

from __future__ import annotations

import hashlib
import os
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.api import join
from gossamer.methods.divisible import Divisible

MEAN_S = 60.0


def digest(vector: Tensor) -> str:
    return hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest()


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(order["width"], order["width"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    swarm = join(model, optimizer, method="divisible", ratio=64.0, warmup=1, period=2, delay=2)
    merged: list[str] = []
    merge, adam_step = Divisible.merge, Divisible.adam_step

    def merging(self: Divisible, worker: Any) -> Any:
        late = yield from merge(self, worker)
        merged.append(digest(late.values))
        return late

    def stepping(self: Divisible, worker: Any, arrived: Any) -> None:
        if merged and "background" in worker.tickets:
            swarm._runtime.state.in_flight[worker.tickets["background"]].result(MEAN_S)
        adam_step(self, worker, arrived)
        if merged:
            state = {name: digest(worker.vector(name)) for name in ("m", "v")}
            applied = digest(arrived[-1].values)
            report = {"at": "merged", "merged": merged.pop(), "applied": applied, "x": digest(worker.x), **state}
            out.send(report)

    Divisible.merge, Divisible.adam_step = merging, stepping  # type: ignore[method-assign]
    for step in range(order["steps"]):
        generator = torch.Generator().manual_seed(100 * rank + step)
        inputs = torch.randn(4, order["width"], generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
        optimizer.step()
    swarm.finish()
    out.send({"at": "finished"})
