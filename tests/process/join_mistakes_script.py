"""A worker that makes one mistake after the other in its calls of join, and reports what it is told."""

from __future__ import annotations

import copy
import logging
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from join_script import make_model, train
from torch import nn

import gossamer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def arguments(mistake: str) -> tuple[nn.Module, Any]:
    """What a worker that makes this mistake gives to join."""
    model = make_model()
    if mistake == "other parameters":
        return model, sgd(copy.deepcopy(model))
    if mistake == "meta device":
        model = model.to("meta")
        return model, sgd(model)
    if mistake == "data parallel":
        return nn.DataParallel(model), sgd(model)
    if mistake == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        return model, sgd(model)
    return model, sgd(model)


def take_turn(mistake: str, wrong: bool) -> str:
    """Join, with a mistake if ``wrong``; return the error's line, empty if there is none."""
    swarms = []
    try:
        model, optimizer = arguments(mistake if wrong else "")
        swarms.append(gossamer.join(model, optimizer, method="gossip", timeout=60))
        if mistake == "twice":
            swarms.append(gossamer.join(model, optimizer, method="gossip", timeout=60))
    except gossamer.InputError as error:
        return str(error)
    finally:
        for swarm in swarms:
            swarm.close()
    return ""


def run(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """``order["turns"]``: mistakes, each with the ranks that make it. All ranks take part in all turns."""
    os.environ.update(environment, RANK=str(rank))
    logging.basicConfig(level=logging.CRITICAL)
    torch.set_num_threads(1)
    for mistake, ranks in order["turns"]:
        if mistake == "ddp":
            # A real one needs a process group.
            dist.init_process_group(
                "gloo", init_method=f"file://{order['file']}", rank=rank, world_size=int(environment["WORLD_SIZE"])
            )
        began = time.monotonic()
        why = take_turn(mistake, rank in ranks)
        out.send({"at": "turn", "why": why, "after_s": time.monotonic() - began})
        if dist.is_initialized():
            dist.destroy_process_group()


def train_and_join_again(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Only worker 1 joins its model again in the middle of the training. The other one waits for what it is told."""
    os.environ.update(environment, RANK=str(rank))
    logging.basicConfig(level=logging.CRITICAL)
    torch.set_num_threads(1)
    model, optimizer = arguments("")
    try:
        with gossamer.join(model, optimizer, method=order["method"]) as swarm:
            train(model, optimizer, 5)
            began = time.monotonic()
            if rank == 1:
                gossamer.join(model, optimizer, method=order["method"])
            while time.monotonic() - began < 60 and not any(event.kind == "failed" for event in swarm.events):
                train(model, optimizer, 1)
    except gossamer.InputError as error:
        out.send({"at": "refused", "why": str(error)})
        return
    out.send({"at": "finished", "events": [(str(event.kind), event.rank, str(event)) for event in swarm.events]})
