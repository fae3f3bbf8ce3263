"""Ranks of replicas that save a checkpoint of each replica, or load the mean of them with another layout."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from replica_script import BATCH, make_model, prepare
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gossamer


def start(rank: int, environment: dict[str, str], order: dict[str, Any]) -> tuple[DeviceMesh, nn.Module, Any]:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", order["shape"], mesh_dim_names=("replica", "shard"))
    model = prepare("fsdp", mesh, make_model(9))  # type: ignore[arg-type]
    return mesh, model, torch.optim.Adam(model.parameters(), lr=order.get("lr", 0.05))


def save(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Make some steps, other ones in each replica, and save what came of it."""
    mesh, model, optimizer = start(rank, environment, order)
    replica = mesh.get_local_rank("replica")
    generator = torch.Generator().manual_seed(replica)
    for _ in range(3 + replica):
        inputs = torch.randn(BATCH, 6, generator=generator)
        nn.functional.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    folder = Path(order["folder"]) / f"replica-{replica}"
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, process_group=mesh["shard"].get_group())
    out.send({"at": "finished"})
    dist.destroy_process_group()


def load(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Load the mean of the replicas into a model and an optimizer, and report all tensors of both."""
    mesh, model, optimizer = start(rank, environment, {**order, "lr": 1.0})
    weights, moments = get_state_dict(model, optimizer)
    state, folders = {"model": weights, "optimizer": moments}, sorted(Path(order["folder"]).glob("replica-*"))
    lines = []
    for wrong in order.get("wrong", ()):
        try:
            gossamer.load_mean(state, wrong, mesh["shard"].get_group())
        except gossamer.InputError as error:
            lines.append(str(error))
    gossamer.load_mean(state, folders, mesh["shard"].get_group())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    tensors = {}
    for part, values in zip(("model", "optimizer.state"), (model.state_dict(), by_name(model, optimizer)), strict=True):
        for name, tensor in values.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            tensors[f"{part}.{name}"] = whole.tolist()
    out.send({"at": "finished", "tensors": tensors, "lr": optimizer.param_groups[0]["lr"], "lines": lines})
    dist.destroy_process_group()


def by_name(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The tensors in the state of the optimizer, by the names of the parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}.{key}": value
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }
