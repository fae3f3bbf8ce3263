"""A small training job for the tests: one worker, told what to do, reporting as it goes."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from gossamer.errors import InputError
from gossamer.process.join import join


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(order.get("device", "cpu"))
    centres = torch.randn(4, 16) * 2
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model.to(device)
    if order.get("other_start") and rank:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    kind = torch.optim.Adam if order["method"] == "divisible" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01 if kind is torch.optim.Adam else 0.05)
    out.send({"at": "start"})
    try:
        swarm = join(model, optimizer, method=order["method"], topology=order.get("topology", "ring"))
    except InputError as error:
        out.send({"at": "refused", "why": str(error)})
        return
    out.send({"at": "joined", "news": swarm.news})
    generator = torch.Generator().manual_seed(rank)
    steps = order["steps"] if isinstance(order["steps"], int) else order["steps"][rank]
    longest, last = 0.0, time.monotonic()
    for step in range(steps):
        labels = torch.randint(0, 4, (16,), generator=generator)
        inputs = centres[labels] + torch.randn(16, 16, generator=generator)
        nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
        time.sleep(order.get("compute_s", 0.01))
        if order.get("poison") == (rank, step):
            next(model.parameters()).grad.fill_(float("nan"))
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        if step % 10 == 9:
            metrics = swarm.metrics()
            out.send({"at": "step", "step": step + 1, "exchanges": metrics.exchanges, "longest": longest})
    if order.get("averaged"):
        with swarm.averaged():
            mean = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            out.send({"at": "averaged", "weights": mean.tolist()})
    out.send({"at": "trained", "steps": swarm.metrics().steps, "longest": longest})
    swarm.finish()
    labels = torch.arange(4).repeat(100)
    inputs = centres[labels] + torch.randn(400, 16, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        accuracy = float((model(inputs.to(device)).argmax(1).cpu() == labels).float().mean())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    out.send({"at": "finished", "accuracy": accuracy, "weights": weights.tolist(), "news": swarm.news})
