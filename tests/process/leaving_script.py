"""Two workers whose weights say what was averaged: worker 1 makes few steps, and leaves before the next average."""

from __future__ import annotations

import itertools
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from gossamer.api import join
from gossamer.process.roster import leaving

PERIOD = 40
LEAVES_AFTER = 5


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Worker 1 adds 1 to its weight in each step, worker 0 leaves its weight as it is.

    Worker 0 ends with the average; where ``shares`` says that there is one in each step, once worker 1 has left. It is
    ``late_s`` late with the step after which worker 1 leaves. If ``goes_on`` is a path, it makes no more until that
    exists.
    """
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    # On a busy machine the other worker may take long to its next average.
    leaving.HAND_OVER_S = order.get("hand_over_s", 300.0)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    swarm = join(model, optimizer, method=order["method"], **order["settings"])
    for step in itertools.count():
        if rank == 1 and step == LEAVES_AFTER:
            swarm.leave()
            break
        if rank == 0 and step == LEAVES_AFTER and "goes_on" in order:
            while not order["goes_on"].exists():
                time.sleep(0.05)
        if rank == 0 and step == LEAVES_AFTER - 1:
            # Worker 1 leaves while this one has not begun its own part in the step.
            time.sleep(order.get("late_s", 0.0))
        has_left = any("worker 1 has left for good" in str(event) for event in swarm.events)
        if rank == 0 and (has_left if order.get("shares") or "goes_on" in order else model.weight.detach().any()):
            break
        (model.weight.sum() * -rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    weight, steps = float(model.weight.detach()), swarm.metrics().steps
    events = [str(event) for event in swarm.events]
    out.send({"at": "trained", "weight": weight, "steps": steps, "events": events})
    swarm.finish()
