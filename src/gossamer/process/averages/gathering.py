"""Means and gathers that the user's thread asks for: of what every worker alive gives.

Messages are bytes of any length: tensors travel as safetensors, other values as JSON, so that nothing from the network
is unpickled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gossamer.errors import InputError
from gossamer.process.averages.series import UserSeries
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.membership import FOREGROUND
from gossamer.process.runtime.worker_runtime import WorkerRuntime

TOPIC = "swarm"


def gather_bytes(runtime: WorkerRuntime, series: UserSeries, message: bytes) -> dict[int, bytes]:
    """Return the message of every worker alive, by rank; only our own if the others went on without this worker.

    Waits for all workers that are alive and not done. All of them must call it.
    """
    if runtime.lifecycle.done:
        raise InputError("this worker has finished: gather and broadcast before finish()")
    groups, of = runtime.groups, runtime.groups.averaged

    def gather() -> dict[int, bytes]:
        # Two gathers: messages differ in length, a gather of torch needs equal ones.
        sizes = groups.gather(of, FOREGROUND, (torch.tensor([len(message)]),), Call("Gather", TOPIC, 0))
        padded = torch.zeros(max(int(size) for (size,) in sizes), dtype=torch.uint8)
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        parts = groups.gather(of, FOREGROUND, (padded,), Call("Gather", TOPIC, 1))
        return {
            rank: part[: int(size)].numpy().tobytes()
            for rank, (part,), (size,) in zip(of.members, parts, sizes, strict=True)
        }

    gathered = series.run(gather, "gather")
    return {runtime.rank: message} if gathered is None else gathered


def mean_over_workers(runtime: WorkerRuntime, series: UserSeries, tensor: Tensor) -> Tensor:
    """Return the mean over all workers alive; ``tensor`` itself if the others went on without this worker."""
    check_tensor(tensor, "mean")
    if tensor.is_complex():
        raise InputError("swarm.mean takes real numbers, not complex ones: give torch.view_as_real(tensor)")
    groups, own = runtime.groups, tensor.detach().flatten().double().to("cpu")
    if runtime.state.replica is not None:
        own = runtime.state.replica.mean(own)

    def average() -> Tensor:
        if not len(own):
            return own
        return groups.mean(groups.averaged, FOREGROUND, own, Call("Mean", TOPIC, 0)).mean

    mean = series.run(average, "mean", len(own))
    dtype = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
    return (own if mean is None else mean).to(dtype).reshape(tensor.shape).to(tensor.device)


def check_tensor(tensor: object, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"swarm.{name} takes a tensor, not a {type(tensor).__name__}: give torch.tensor(value)")


def encode_tensor(tensor: Tensor) -> bytes:
    check_tensor(tensor, "gather")
    return save({"tensor": tensor.detach().to("cpu").contiguous()})


def decode_tensor(message: bytes, rank: int) -> Tensor:
    """Return the tensor of ``rank``."""
    try:
        return load(message)["tensor"]
    except (SafetensorError, KeyError):
        raise InputError(f"worker {rank} did not send a tensor: all workers must call the same function") from None


def encode_value(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError):
        raise InputError(
            f"cannot send a value of type {type(value).__name__} to other workers: "
            "expected numbers, strings, booleans, None, and lists and dictionaries of them"
        ) from None


def decode_value(message: bytes, rank: int) -> Any:
    """Return the value of ``rank``."""
    try:
        return json.loads(message)
    except ValueError:
        raise InputError(f"worker {rank} did not send JSON: all workers must call the same function") from None
