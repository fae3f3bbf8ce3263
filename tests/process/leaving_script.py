"""Two workers whose weights say what was averaged: worker 1 makes few steps, and leaves before the next average."""

from __future__ import annotations

import itertools
import os
from multiprocessing.connection import Connection
from typing import Any

import torch

from gossamer.api import join
from gossamer.process.roster import leaving

PERIOD = 40
LEAVES_AFTER = 5


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Worker 1 adds 1 to its weight in each step, worker 0 leaves its weight as it is."""
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    # On a busy machine the other worker may take long to its next average.
    leaving.HAND_OVER_S = 300.0
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    swarm = join(model, optimizer, method=order["method"], period=PERIOD)
    for step in itertools.count():
        if rank == 1 and step == LEAVES_AFTER:
            swarm.leave()
            break
        if rank == 0 and model.weight.detach().any():
            break
        (model.weight.sum() * -rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    weight, steps = float(model.weight.detach()), swarm.metrics().steps
    events = [str(event) for event in swarm.events]
    out.send({"at": "trained", "weight": weight, "steps": steps, "events": events})
    swarm.finish()
