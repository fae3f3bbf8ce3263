"""Gloo process groups of our own making, beside whatever the user has.

Everything here that torch keeps private is in this file.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from gossamer.process.priority import give_way

_NEVER_SENT = 9
"""A tag under which nothing is ever sent."""


@lru_cache(maxsize=2)
def _device(beside: bool) -> Any:
    """One network device for all groups of this process: one thread instead of one each. Groups that are used beside
    the training have another than those that it waits for, whose thread gives way."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return dist.ProcessGroupGloo.create_default_device()


def make_group(store: dist.Store, name: str, rank: int, size: int, timeout_s: float, beside: bool = False) -> Any:
    """A group of ``size`` members that meet under ``name``; raises when they do not within ``timeout_s``.

    ``beside``: it is used beside the training, and its threads give way to that. They hold nothing that the training
    may wait for.
    """
    if beside:
        with ThreadPoolExecutor(1, initializer=give_way) as yielding:
            return yielding.submit(_make_group, store, name, rank, size, timeout_s, beside).result()
    return _make_group(store, name, rank, size, timeout_s, beside)


def _make_group(store: dist.Store, name: str, rank: int, size: int, timeout_s: float, beside: bool) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device(beside)]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)


def sever(group: Any) -> None:
    """Close the connections to all other members, so that they and we notice.

    Gloo has no call for it; a receive that times out does it.
    """
    for other in range(group.size()):
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.zeros(1)], other, _NEVER_SENT).wait(timedelta(milliseconds=1))
