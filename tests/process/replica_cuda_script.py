"""A replica of one rank with FSDP2, on a GPU or the CPU: a job of its own, which reports what it trained and copied."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import gossamer

WARM = 4
"""The first steps, which connect and allocate: their copies do not count."""
WIDTH = 128


def run(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Train replica ``rank`` of two on ``order["device"]``."""
    os.environ.update(environment, RANK="0", WORLD_SIZE="1", MASTER_PORT=str(order["ports"][rank]))
    torch.set_num_threads(1)
    device, on_gpu = order["device"], order["device"] == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    between = gossamer.Replica(rank, 2, order["address"])
    swarm = gossamer.join(
        model, optimizer, mesh=mesh, between=between, method=order["method"], timeout=60, **order["settings"]
    )
    generator = torch.Generator().manual_seed(rank)
    # On the device before the profile: these copies are the training's own.
    batches = [torch.randn(16, WIDTH, generator=generator).to(device) for _ in range(order["steps"])]

    losses = []

    def train(given: list[torch.Tensor]) -> None:
        for inputs in given:
            loss = nn.functional.mse_loss(model(inputs), inputs.sin())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

    train(batches[:WARM])
    with contextlib.ExitStack() as stack:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        profiler = stack.enter_context(profile(activities=activities)) if on_gpu else None
        train(batches[WARM:])
        if on_gpu:
            torch.cuda.synchronize()
    swarm.finish()
    weights = torch.cat([parameter.full_tensor().detach().cpu().flatten() for parameter in model.parameters()])
    copies = [] if profiler is None else find_copies(profiler)
    ends = [losses[0].item(), losses[-1].item()]
    out.send({"at": "finished", "weights": weights.tolist(), "copies": copies, "losses": ends})
    dist.destroy_process_group()


def find_copies(profiler: profile) -> list[tuple[bool, int]]:
    """Return each copy between GPU and host: whether it ran on the training stream, and its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    streams = [event["args"]["stream"] for event in events if event.get("cat") == "kernel"]
    training = max(set(streams), key=streams.count)
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    between = [event for event in copies if "DtoH" in event["name"] or "HtoD" in event["name"]]
    return [(event["args"]["stream"] == training, event["args"].get("bytes", 0)) for event in between]
