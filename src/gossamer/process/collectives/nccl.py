"""NCCL process groups of our own: averages from GPU to GPU. All uses of torch's private NCCL API are in this file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossamer.errors import InputError
from gossamer.process.collectives.group_connections import HOPELESS_CHECK_S
from gossamer.process.store.failover_store import FailoverStore


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


class GroupStore(dist.Store):
    """The failover store in the form in which torch builds process groups with it.

    It waits for members until ``timeout_s`` or ``hopeless()``.
    """

    def __init__(self, store: FailoverStore, timeout_s: float, hopeless: Callable[[], bool]) -> None:
        super().__init__()
        self._store, self._timeout_s, self._hopeless = store, timeout_s, hopeless

    def set(self, key: str, value: Any) -> None:
        if not self._store.set(key, value):
            raise RuntimeError("no store can be reached")

    def get(self, key: str) -> bytes:
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            began = time.monotonic()
            if self._store.has_all([key], HOPELESS_CHECK_S):
                value = self._store.get(key)
                if value is not None:
                    return value
            if self._hopeless():
                break
            if time.monotonic() - began < HOPELESS_CHECK_S / 2:
                # No store can be reached now.
                time.sleep(HOPELESS_CHECK_S / 2)
        raise RuntimeError(f"nobody published {key}")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.has_all(keys)

    def add(self, key: str, amount: int) -> int:
        value = self._store.add(key, amount)
        if value is None:
            raise RuntimeError("no store can be reached")
        return value
