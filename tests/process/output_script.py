"""A loop of one's own for the tests, with a run folder: it logs as it goes, and says what came of it."""

from __future__ import annotations

import json
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gossamer
from gossamer.runs.status_reporter import StatusReporter


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    centres = torch.randn(4, 16) * 2
    arguments = dict(order["join"])
    if rank == order.get("publishes_late"):
        publish_last = StatusReporter.publish_last
        StatusReporter.publish_last = lambda *given, **named: (time.sleep(1.0), publish_last(*given, **named))[1]
    if "tracked" in order:
        arguments["tracker"] = Tracker(order["tracked"])
    try:
        swarm = gossamer.join(model, optimizer, method="gossip", **arguments)
    except gossamer.InputError as error:
        out.send({"at": "refused", "why": str(error)})
        return
    out.send({"at": "joined"})
    generator = torch.Generator().manual_seed(rank)
    with swarm:
        for step in range(order["steps"]):
            if "until" in order and Path(order["until"]).exists():
                break
            labels = torch.randint(0, 4, (16,), generator=generator)
            inputs = centres[labels] + torch.randn(16, 16, generator=generator)
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, labels)
            loss.backward()
            time.sleep(0.01)
            optimizer.step()
            optimizer.zero_grad()
            swarm.log(loss=loss, accuracy=(outputs.argmax(1) == labels).float().mean(), temperature=20 + rank)
            if step % 10 == 9:
                out.send({"at": "step", "step": step + 1})
        if order.get("averaged"):
            with swarm.averaged():
                swarm.log(accuracy=0.5, loss=torch.tensor(1.5))
    if "final" in order:
        swarm.log(accuracy=order["final"])
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    events = [[event.kind, str(event)] for event in swarm.events]
    out.send({"at": "finished", "weights": weights, "events": events, "steps": swarm.metrics().steps})


class Tracker:
    """Writes what it is called with, and by whom."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, step: int, scalars: dict[str, float]) -> None:
        with open(self.path, "a") as lines:
            lines.write(json.dumps([os.getpid(), step, scalars]) + "\n")
