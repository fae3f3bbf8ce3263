"""A worker that makes one mistake after the other in its loop, catches the errors, and goes on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from join_script import make_model, train
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.process.watches import waits

PATIENCE_S = 0.5
LATE_S = 1.2


def run(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    logging.basicConfig(level=logging.CRITICAL)
    torch.set_num_threads(1)
    waits.SAY_AFTER_S = PATIENCE_S
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    swarm = gossamer.join(model, optimizer, method=order["method"])
    said: dict[str, str] = {}

    def attempt(name: str, act: Callable[[], object]) -> None:
        try:
            said[name] = str(act())
        except gossamer.InputError as error:
            said[name] = str(error)

    def step_in_average() -> None:
        with swarm.averaged():
            train(model, optimizer, 1)

    def finish_in_average() -> None:
        with swarm.averaged():
            swarm.finish()

    def deal() -> object:
        loader = DataLoader(TensorDataset(torch.arange(40)), batch_size=4 + rank)
        return len(next(iter(swarm.batches(loader, epochs=1))))

    train(model, optimizer, 3)
    attempt("shapes", lambda: swarm.mean(torch.ones(2 + rank)))
    attempt("calls", lambda: swarm.mean(torch.ones(3)) if rank == 0 else swarm.gather(torch.ones(3)))
    attempt("whole numbers", lambda: swarm.mean(torch.tensor([rank])).tolist())
    attempt("empty", lambda: swarm.mean(torch.empty(0)).tolist())
    attempt("no tensor", lambda: swarm.mean(0.5))  # type: ignore[arg-type]
    attempt("complex", lambda: swarm.mean(torch.ones(2, dtype=torch.complex64)))
    attempt("step in average", step_in_average)
    attempt("finish in average", finish_in_average)
    optimizer.zero_grad()
    attempt("deal", deal)
    if rank == 1:
        # The other one waits in its mean, and later in finish().
        time.sleep(LATE_S)
    attempt("late", lambda: swarm.mean(torch.tensor(float(rank))).item())
    train(model, optimizer, 3)
    if rank == 1:
        time.sleep(LATE_S)
    swarm.finish()
    attempt("too late", lambda: swarm.mean(torch.ones(1)))
    events = [(str(event.kind), str(event)) for event in swarm.events]
    out.send({"at": "finished", "said": said, "events": events, "weights": [p.tolist() for p in model.parameters()]})
