"""A worker's state as one file: tensors as safetensors, everything else as JSON in its header. Nothing is pickled."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "gossamer worker 1"


class Unusable(Exception):
    """A file that is not a whole state of a worker; says why."""


def write_state(path: Path, state: Mapping[str, Any], made: int) -> None:
    """Keep ``state``, nested data with tensors in it, of a worker that has made so many steps.

    Written beside its place and renamed, so that it is there as a whole or not at all. ``OSError`` if that fails.
    """
    tensors: dict[str, Tensor] = {}
    rest = json.dumps(_pack(dict(state), "", tensors))
    beside = path.with_name(path.name + ".part")
    try:
        save_file(tensors, beside, metadata={"format": FORMAT, "made": str(made), "state": rest})
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    except (OSError, SafetensorError) as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise
        raise OSError(None, str(error)) from None


def read_state(path: Path) -> dict[str, Any]:
    """What ``write_state`` kept, tensors in host memory; ``Unusable`` if it is not whole."""
    with _opened(path) as file:
        rest = file.metadata()["state"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    unpacked = _unpack(json.loads(rest), tensors)
    assert isinstance(unpacked, dict)
    return unpacked


def steps_made(path: Path) -> int:
    """How many steps the worker of this file had made; ``Unusable`` if it is not whole."""
    with _opened(path) as file:
        return int(file.metadata()["made"])


def _opened(path: Path) -> Any:
    try:
        # Opening checks that the file is as long as its header says.
        file = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise Unusable(f"{path.name} is missing") from None
    except (OSError, SafetensorError):
        raise Unusable(f"{path.name} is truncated, or no safetensors file") from None
    if (file.metadata() or {}).get("format") != FORMAT:
        raise Unusable(f"{path.name} was not written by this version of gossamer train")
    return file


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON can hold it; tensors are put aside under the path that leads to them."""
    if isinstance(value, Tensor):
        # A copy: tensors may be views of one vector.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(entry, f"{name}/{key}", tensors)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        packed = [_pack(entry, f"{name}/{position}", tensors) for position, entry in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": packed}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _pack(torch.from_numpy(value), name, tensors)
    assert value is None or isinstance(value, bool | int | float | str), f"{name} is a {type(value).__name__}"
    return value


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(entry, tensors) for key, entry in content}
    entries = [_unpack(entry, tensors) for entry in content]
    return tuple(entries) if kind == "tuple" else entries
