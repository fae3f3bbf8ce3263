"""Gathers that the user's thread asks for: what every worker alive gives, in rank order.

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
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.membership import FOREGROUND, StepRetry
from gossamer.process.events import EventKind
from gossamer.process.runtime.worker_runtime import WorkerRuntime

TOPIC = "swarm"


def gather_bytes(runtime: WorkerRuntime, message: bytes) -> dict[int, bytes]:
    """Return the message of every worker alive, by rank; only our own if a worker is lost meanwhile.

    Waits for all workers that are alive and not done. All of them must call it.
    """
    if runtime.lifecycle.done:
        raise InputError("this worker has finished: gather and broadcast before finish()")
    groups, of = runtime.groups, runtime.groups.averaged
    try:
        of.begin()
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
    except StepRetry:
        # The others may have theirs already and have gone on: it cannot be repeated.
        text = "a worker was lost while values were gathered: using only our own"
        runtime.state.events.add(EventKind.NOT_AVERAGED, text)
        return {runtime.rank: message}


def encode_tensor(tensor: Tensor) -> bytes:
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
