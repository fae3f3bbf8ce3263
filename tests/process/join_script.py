"""A worker that joins as it is told, rightly or wrongly, and reports what came of it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gossamer
from gossamer.errors import InputError
from gossamer.process.joining import handshake
from gossamer.process.joining.handshake import Handshake


class Touch(logging.Handler):
    """Makes a file when something is said."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        self.path.touch()


def is_enough(told: Path, step: int) -> bool:
    """Whether to end before ``step``: once a test has said that it is enough, all end after the same step."""
    if not told.exists():
        return False
    end, own = told.with_suffix(".step"), told.with_suffix(f".{os.getpid()}")
    if not end.exists():
        # Whole, or not at all. In lockstep nobody is more than a step ahead.
        own.write_text(str(step + 2))
        with contextlib.suppress(FileExistsError):
            os.link(own, end)
    return step >= int(end.read_text())


def make_model(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


def train(model: nn.Module, optimizer: Any, steps: int, between: Callable[[], None] = lambda: None) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(8, 6, generator=generator)
        nn.functional.mse_loss(model(inputs), inputs[:, :3]).backward()
        optimizer.step()
        optimizer.zero_grad()
        between()


def run(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """``order["ranks"][rank]`` is what this rank does otherwise than ``order``."""
    own = {**order, **order.get("ranks", {}).get(rank, {})}
    os.environ.update(environment, RANK=str(rank))
    if "world" in own:
        os.environ["WORLD_SIZE"] = str(own["world"])
    if "version" in own:
        gossamer.__version__ = own["version"]
    if "dies" in own and "revived" not in environment:
        setattr(Handshake, own["dies"], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    handshake.SAY_AFTER_S = own.get("say_after_s", handshake.SAY_AFTER_S)
    logging.basicConfig(level=logging.CRITICAL)
    torch.set_num_threads(1)
    model = make_model(own.get("width", 8))
    if own.get("mask"):
        model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    kind = getattr(torch.optim, own.get("optimizer", "SGD"))
    optimizer = kind(model.parameters(), lr=0.05)
    if own.get("accelerated"):
        from accelerate import Accelerator

        wrapper = Accelerator(cpu=True).prepare(optimizer)
        optimizer = optimizer if own.get("unwrapped") else wrapper
    time.sleep(own.get("late_s", 0.0))
    while "late" in own and not own["late"].exists():
        time.sleep(0.01)
    if "waited" in own:
        # As soon as this worker says that it waits.
        logger = logging.getLogger("gossamer")
        logger.addHandler(Touch(own["waited"]))
        logger.setLevel(logging.INFO)
        logger.propagate = False
    began = time.monotonic()
    out.send({"at": "start"})
    try:
        arguments = {
            name: own[name] for name in ("method", "topology", "wire", "seed", "timeout", "rate") if name in own
        }
        if own.get("out"):
            arguments["tracker"] = print
        pair = (optimizer, model) if own.get("swapped") else (model, optimizer)
        swarm = gossamer.join(*pair, **arguments)
    except InputError as error:
        out.send({"at": "refused", "why": str(error), "after_s": time.monotonic() - began})
        return
    out.send({"at": "joined", "after_s": time.monotonic() - began})
    steps = own.get("steps", 20)
    if own.get("replaced"):
        optimizer = kind(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    try:
        for _ in range(steps):
            if "until" in own and is_enough(own["until"], swarm._runtime.worker.step):
                break
            inputs = torch.randn(8, 6, generator=generator)
            nn.functional.mse_loss(model(inputs), inputs[:, :3]).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(own.get("compute_s", 0.0))
        if own.get("poisoned"):
            with torch.no_grad():
                model[0].weight.fill_(own["poisoned"])
        weights = [p.detach().clone() for p in model.parameters()]
        swarm.finish()
    except InputError as error:
        kept = all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True)) if steps < 10 else None
        out.send({"at": "failed", "why": str(error), "kept": kept})
        swarm.close()
        return
    outcome = {"steps": swarm.metrics().steps, "events": [(str(e.kind), str(e)) for e in swarm.events]}
    outcome["buffers"] = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    out.send({"at": "finished", "weights": [p.tolist() for p in model.parameters()], **outcome})
