"""Workers that train a network with batch norm on digits, and report what was said and what they hold in the end."""

from __future__ import annotations

import logging
import os
import time
from importlib import resources
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.process.watches import peer_watch
from gossamer.tasks.digits import conv

ALONE_FROM = 40
"""The step that a worker makes only after those with fewer mini-batches have ended."""


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load(part: str) -> tuple[Tensor, Tensor]:
    """Pixels from 0 to 1: their statistics are far from those with which batch norm begins."""
    with (resources.files("gossamer.tasks") / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays[f"x_{part}"][:, None].astype(np.float32) / 16, arrays[f"y_{part}"].astype(np.int64)
    return torch.from_numpy(images), torch.from_numpy(labels)


def accuracy(model: nn.Module) -> float:
    images, labels = load("test")
    model.eval()
    with torch.no_grad():
        right = model(images).argmax(1) == labels
    model.train()
    return float(right.float().mean())


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    log = _Lines()
    logging.getLogger("gossamer").addHandler(log)
    logging.getLogger("gossamer").setLevel(logging.INFO)
    peer_watch.WINDOW_S = order.get("window_s", peer_watch.WINDOW_S)
    model = conv()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    images, labels = (part[rank :: int(environment["WORLD_SIZE"])] for part in load("train"))
    swarm = gossamer.join(model, optimizer, method=order["method"], **order.get("settings", {}))
    pauses, steps = order.get("pause_s", 0.0), order["steps"]
    most = steps if isinstance(steps, int) else max(steps)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=most)
    generator = torch.Generator().manual_seed(rank)
    pause_s = pauses if isinstance(pauses, float) else pauses[rank]
    num_said = 0
    for step in range(steps if isinstance(steps, int) else steps[rank]):
        if "until" in order and order["until"].exists():
            break
        if "ended" in order and step == ALONE_FROM:
            # However the machine shares its cores out: those with fewer mini-batches end before the one with the most.
            while len(list(order["ended"].iterdir())) < len(steps) - 1:
                time.sleep(0.01)
        chosen = torch.randperm(len(images), generator=generator)[:20]
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        time.sleep(pause_s)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        for event in swarm.events[num_said:]:
            num_said += 1
            out.send({"at": "event", "kind": str(event.kind), "rank": event.rank, "time": event.time})
        if step % 10 == 9:
            out.send({"at": "step", "step": step + 1})
    if "ended" in order:
        (order["ended"] / str(rank)).touch()
    if rank in order.get("closes", ()):
        swarm.close()
        out.send({"at": "finished"})
        return
    before = accuracy(model)
    restored = False
    if order.get("recalibrates"):
        own = [buffer.clone() for buffer in model.buffers()]
        with swarm.averaged():
            swarm.recalibrate([(images, labels)])
            changed = any(not torch.equal(a, b) for a, b in zip(own, model.buffers(), strict=True))
        restored = changed and all(torch.equal(a, b) for a, b in zip(own, model.buffers(), strict=True))
    swarm.finish()
    if order.get("recalibrates"):
        everything = load("train")[0]
        swarm.recalibrate(DataLoader(TensorDataset(everything, everything), batch_size=256), batches=4)
    out.send(
        {
            "at": "finished",
            "before": before,
            "restored": restored,
            "after": accuracy(model),
            "state": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
            "events": [(str(event.kind), event.rank, str(event)) for event in swarm.events],
            "log": log.lines,
            "lost": swarm.metrics().lost,
        }
    )
