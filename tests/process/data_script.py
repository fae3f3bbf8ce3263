"""A worker that trains on numbers and reports which ones it has seen, with its progress and its learning rate."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from gossamer.api import join

SIZE = 40


def train_on_numbers(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # data must be dealt well whatever the state of a worker's generator
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    swarm = join(model, optimizer, method=order["method"], topology="ring")
    schedule = swarm.schedule("cosine", warmup=0.1, min_factor=0.1)
    loader = DataLoader(torch.arange(float(SIZE)).reshape(-1, 1), batch_size=2, shuffle=True)
    pause_s = order["pause_s"][rank]
    out.send({"at": "joined"})

    def step(epoch: int, x: torch.Tensor) -> None:
        model(x).sum().backward()
        time.sleep(pause_s)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        (lr,) = schedule.get_last_lr()
        out.send({"at": "step", "epoch": epoch, "seen": x.flatten().tolist(), "progress": swarm.progress, "lr": lr})

    if "total_steps" in order:
        for x in swarm.batches(loader, total_steps=order["total_steps"]):
            step(0, x)
    else:
        share = swarm.shard(loader)
        for epoch in swarm.epochs(order["epochs"]):
            for x in share:
                step(epoch, x)
            if order.get("averaged"):
                with swarm.averaged():
                    out.send({"at": "averaged", "weights": model.weight.item()})
            out.send({"at": "epoch", "epoch": epoch})
            # A test may make a worker wait until the others have died, or until it has seen what it wants to.
            until, wait = time.monotonic() + 60, order.get("wait", {}).get((rank, epoch))
            while wait == "alone" and swarm.metrics().peers_alive and time.monotonic() < until:
                time.sleep(0.02)
            while wait == "company" and not swarm.metrics().peers_alive and time.monotonic() < until:
                time.sleep(0.02)
            while wait == "file" and not order["file"].exists() and time.monotonic() < until:
                time.sleep(0.02)
    lr = optimizer.param_groups[0]["lr"]
    out.send({"at": "trained", "progress": swarm.progress, "lr": lr, "events": [event.kind for event in swarm.events]})
    swarm.finish()
    out.send({"at": "finished"})


def run_page(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Run the code of a page and report the targets that its loss was given."""
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    mse_loss, seen = nn.functional.mse_loss, []

    def recorded(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.extend(target.flatten().tolist())
        return mse_loss(predicted, target)

    nn.functional.mse_loss = recorded
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(order["code"], namespace)
    weights = namespace["model"].weight.flatten().tolist()
    out.send({"at": "finished", "seen": seen, "inputs": namespace["inputs"].sum(1).tolist(), "weights": weights})
