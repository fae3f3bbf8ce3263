"""A rank of a replica that trains as it is told, and reports what came of it."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import runpy
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gossamer
from gossamer.errors import InputError

BATCH = 8


def make_model(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4))


def prepare(kind: str, mesh: DeviceMesh, model: nn.Sequential) -> nn.Module:
    """The user's own parallelism."""
    if kind == "fsdp":
        fully_shard(model[0], mesh=mesh["shard"])
        return fully_shard(model, mesh=mesh["shard"])
    if kind == "fsdp-blocks":
        # The last layer is left out.
        fully_shard(model[0], mesh=mesh["shard"])
        return model
    if kind == "fsdp-world":
        return fully_shard(model, mesh=mesh)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=mesh["shard"].get_group())
    if kind == "ddp-world":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp-tp":
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["shard"])
    if kind == "tp":
        return parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def whole(model: nn.Module) -> list[Tensor]:
    """The weights of the whole model."""
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def die_in_mean(runtime: Any, step: int) -> None:
    """Die in a mean of the training, before sending anything: the mean of the other shard completes."""
    mean = runtime.groups.mean

    def dying(*arguments: Any, **options: Any) -> Any:
        if runtime.worker.step == step:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return mean(*arguments, **options)

    runtime.groups.mean = dying


def run(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """``order["ranks"][rank]`` is what this rank does otherwise than ``order``."""
    own = {**order, **order.get("ranks", {}).get(rank, {})}
    os.environ.update(environment, RANK=str(rank))
    logging.basicConfig(level=logging.CRITICAL)
    torch.set_num_threads(1)
    replicas, *inner = own.get("shape", (2, 2))
    shards, names = math.prod(inner), ("replica", "shard", "tensor")
    replica, shard = rank // shards, rank % shards
    if "sizes" in own:
        # Jobs of different sizes: ranks count on from one to the next.
        replica, shard = [(job, each) for job, size in enumerate(own["sizes"]) for each in range(size)][rank]
        replicas, shards = len(own["sizes"]), own["sizes"][replica]
    if own.get("jobs"):
        # Each replica is a job of its own.
        port = own["ports"][replica + (replicas if "revived" in environment else 0)]
        os.environ.update(RANK=str(shard), WORLD_SIZE=str(shards), MASTER_PORT=str(port))
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (shards,), mesh_dim_names=("shard",))
        between: Any = gossamer.Replica(replica, replicas, own["address"])
    else:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (replicas, *inner), mesh_dim_names=names[: 1 + len(inner)])
        between = own.get("between", "replica")
    out.send({"at": "start"})
    for attempt in own.get("attempts", ()):
        wrong = {**own, **attempt, **attempt.get("ranks", {}).get(rank, {})}
        try:
            train(rank, replica, wrong, mesh, wrong.get("between", between), out)
        except InputError as error:
            out.send({"at": "refused", "why": str(error)})
    try:
        if own.get("constant"):
            from replica_constant import train_constant

            for part in own.get("rounds", [{}]):
                outcome = train_constant(rank, replica, {**own, **part}, mesh, between, out)
                out.send({"at": "trained", **outcome})
        else:
            for part in own.get("rounds", [{}]):
                outcome = train(rank, replica, {**own, **part}, mesh, between, out)
                out.send({"at": "trained", **outcome})
    except InputError as error:
        out.send({"at": "refused", "why": str(error)})
        sys.exit(1)
    out.send({"at": "finished", **outcome})
    dist.destroy_process_group()


def last_step(own: dict[str, Any]) -> int:
    """The step after which training ends; a test may say that later, in the file ``own["last"]``."""
    if "last" not in own:
        return int(own.get("steps", 8))
    return int(own["last"].read_text()) if own["last"].exists() else 1_000_000


def train(
    rank: int, replica: int, own: dict[str, Any], mesh: DeviceMesh, between: Any, out: Connection
) -> dict[str, Any]:
    model = make_model(own.get("width", 8))
    if own.get("other_start") and replica:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    parallel = prepare(own["kind"], mesh, model)
    foreach = {} if "tp" not in own["kind"] else {"foreach": False}
    optimizer = getattr(torch.optim, own.get("optimizer", "Adam"))(parallel.parameters(), lr=0.05, **foreach)
    given = mesh[own["slice"]] if "slice" in own else mesh
    swarm = gossamer.join(
        parallel, optimizer, mesh=given, between=between, method=own["method"], timeout=60, **own.get("settings", {})
    )
    if own.get("dies_in_mean") == rank and "revived" not in os.environ:
        die_in_mean(swarm._runtime, own["at_step"])
    out.send({"at": "joined", "step": swarm._runtime.worker.step})
    generator, shards = torch.Generator().manual_seed(replica), mesh["shard"].size()
    torn, spoilt = 0, False
    last = own.get("last")
    if last is not None and "revived" in os.environ:
        # The others cannot go on without this rank: all see the file before they are at the step that it names.
        while not last.exists():
            time.sleep(0.02)
    while swarm._runtime.worker.step < last_step(own):
        inputs = torch.randn(BATCH, 6, generator=generator)
        if own["kind"] != "tp":
            inputs = inputs.chunk(shards)[mesh.get_local_rank("shard")]
        loss = nn.functional.mse_loss(parallel(inputs), inputs[:, :4].sin())
        loss.backward()
        if swarm._runtime.worker.step == own.get("spoilt_at") and rank == 3 and not spoilt:
            spoilt = True
            next(parallel.parameters()).grad.to_local()[0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
        members = sum(1 << member for member in swarm._runtime.groups.train.members)
        state = torch.tensor([swarm._runtime.worker.step, members])
        torn += len({tuple(each.tolist()) for each in swarm._runtime.state.replica.inner.gather(state)}) > 1
        out.send({"at": "step", "step": swarm._runtime.worker.step})
        hangs = own.get("hangs") == rank and swarm._runtime.worker.step > 2 and "revived" not in os.environ
        time.sleep(100 if hangs else own.get("compute_s", 0.0))
    with swarm.averaged():
        averaged = whole(model)
    if own.get("leaves"):
        try:
            swarm.leave()
        except InputError as error:
            out.send({"at": "refused", "why": str(error)})
    mean = swarm.mean(torch.tensor(float(rank)))
    state = swarm.state_dict()
    swarm.finish()
    weights = whole(model)
    return {
        "weights": [p.tolist() for p in weights],
        "averaged": [p.tolist() for p in averaged],
        "mean": float(mean),
        "torn": torn,
        "shard": state["shard"],
        "size": len(state["x"]),
        "steps": swarm.metrics().steps,
        "events": [str(event) for event in swarm.events],
    }


def run_example(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Run a script of ``examples/`` and report what it prints."""
    os.environ.update(environment, RANK=str(rank))
    sys.argv = [order["example"], *order["arguments"]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(order["example"], run_name="__main__")
    out.send({"at": "finished", "printed": printed.getvalue()})
