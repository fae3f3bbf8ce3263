"""One real worker's part in a run that the virtual cluster makes too: same seed, same weights, same mini-batches."""

from __future__ import annotations

import dataclasses
import os
from multiprocessing.connection import Connection
from typing import Any

import torch

from gossamer.api import join
from gossamer.config import resolve
from gossamer.tasks import worker_batches


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    (run,) = resolve(order["values"])
    c, task = run.config, run.task
    torch.manual_seed(c.seed)
    model = task.model()
    optimizer = run.make_optimizer(list(model.parameters()))
    batches = worker_batches(task, c.partition, c.workers, c.batch, c.seed)[rank]
    options = dataclasses.asdict(run.method_config)
    swarm = join(model, optimizer, method=c.method, topology=c.topology, seed=c.seed, **options)
    for step in range(c.steps):
        index = torch.from_numpy(batches.take(step))
        optimizer.zero_grad()
        task.loss(model(task.train[0][index]), task.train[1][index]).backward()
        optimizer.step()
    swarm.finish()
    out.send({"at": "finished", "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()})
