"""NCCL process groups of our own: averages from GPU to GPU. All uses of torch's private NCCL API are in this file."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from gossamer.errors import InputError


def check(device: torch.device) -> None:
    """Raise ``InputError`` if NCCL cannot send tensors on ``device``."""
    if device.type != "cuda" or not dist.is_nccl_available():
        raise InputError(
            f'transport "nccl" needs a model on CUDA and a torch with NCCL, and this one is on {device.type}: '
            'take transport "tcp"'
        )


def connect(store: dist.Store, name: str, rank: int, size: int) -> Any:
    """Connect the ``size`` members that use ``name`` to a process group."""
    # By default torch ends the whole process when a peer dies. We rebuild the group instead.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, dist.ProcessGroupNCCL.Options())


def disconnect(group: Any) -> None:
    """Abort what is in flight in ``group``, so that waiting threads notice."""
    group.abort()
