"""The mean of checkpoints that replicas wrote with ``torch.distributed.checkpoint``, for any layout over ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import InputError
from gossamer.vectors.flat import local_part


def load_mean(state: dict[str, Any], folders: Sequence[str | os.PathLike[str]], process_group: Any) -> None:
    """Load the mean of several checkpoints of ``torch.distributed.checkpoint`` into ``state``, tensor by tensor.

    A run resumes this way with other numbers of replicas and shards: each replica has written a checkpoint of its own,
    and all start from the mean of them. One folder is loaded as it is.

    Args:
        state: what was saved, nested as it was then; its tensors are written in place. They may lie on other ranks
            than those that were saved. What is no tensor of floating-point numbers is that of the first folder.
        folders: the checkpoints, one of each replica.
        process_group: the ranks that hold ``state``, such as ``mesh["shard"].get_group()``. All of them must call this.

    Raises:
        InputError: a folder cannot be read, or does not hold what ``state`` does.
    """
    if not folders:
        raise InputError("load_mean got no folder: give the checkpoint of at least one replica")
    sums: dict[str, Tensor] = {}
    # The first one last: what has no mean is its.
    for folder in reversed(folders):
        _load(state, folder, process_group)
        for name, tensor in _floating(state):
            part = local_part(tensor.detach())
            wide = part.to(torch.promote_types(part.dtype, torch.float32), copy=True)
            sums[name] = wide if name not in sums else sums[name].add_(wide)
    if len(folders) > 1:
        for name, tensor in _floating(state):
            local_part(tensor.detach()).copy_(sums[name].div_(len(folders)))


def _load(state: dict[str, Any], folder: str | os.PathLike[str], process_group: Any) -> None:
    # It loads much of torch.distributed.
    import torch.distributed.checkpoint as dcp

    try:
        dcp.load(state, checkpoint_id=folder, process_group=process_group)
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise InputError(f"the checkpoint {os.fspath(folder)} cannot be loaded: {_line(cause)}") from None


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _floating(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of floating-point numbers in nested data, each with the path that leads to it."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _floating(entry, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for position, entry in enumerate(value):
            yield from _floating(entry, f"{name}/{position}")
