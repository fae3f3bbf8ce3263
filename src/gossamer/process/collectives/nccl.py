"""NCCL process groups of our own making: averages that stay on the GPUs, where each worker has one to itself.

Everything of NCCL that torch keeps private is in this file.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from gossamer.errors import InputError


def check(device: torch.device) -> None:
    """Raise ``InputError`` if tensors on ``device`` cannot travel with NCCL."""
    if device.type != "cuda" or not dist.is_nccl_available():
        raise InputError(
            f'transport "nccl" needs a model on CUDA and a torch with NCCL, and this one is on {device.type}: '
            'take transport "gloo"'
        )


def make_group(store: dist.Store, name: str, rank: int, size: int) -> Any:
    """A group of ``size`` members that meet under ``name``."""
    # By default torch ends the whole process when a peer is gone. We rebuild the group.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, dist.ProcessGroupNCCL.Options())


def is_nccl(group: Any) -> bool:
    return dist.is_nccl_available() and isinstance(group, dist.ProcessGroupNCCL)


def sever(group: Any) -> None:
    """Give up what is under way in ``group``, so that whoever waits for it notices."""
    group.abort()
