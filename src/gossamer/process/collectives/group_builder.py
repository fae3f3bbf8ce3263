"""Builds, waits in and closes groups: the one place that knows of both transports, our own and NCCL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossamer.process.collectives import nccl
from gossamer.process.collectives.group_connections import GroupConnections
from gossamer.process.collectives.peer_group import PeerGroup, Pending
from gossamer.process.store.failover_store import FailoverStore

BUILD_TIMEOUT_S = 5.0
"""How long it may take to connect members that are all ready."""


class GroupBuilder:
    """Builds the groups of worker ``rank``."""

    def __init__(self, rank: int, store: FailoverStore, connections: GroupConnections) -> None:
        self.rank, self.store, self._connections = rank, store, connections

    def build(
        self,
        name: str,
        members: tuple[int, ...],
        *,
        hopeless: Callable[[tuple[int, ...]], bool],
        on_gpu: bool = False,
    ) -> Any:
        """Return the group of ``members``, who all call this with the same unique ``name``.

        They connect when they first communicate, with NCCL here: then RuntimeError if they do not connect, or once
        ``hopeless(awaited members)`` says that some will not come.
        """
        if on_gpu:
            store = nccl.GroupStore(self.store, BUILD_TIMEOUT_S, lambda: hopeless(members))
            return nccl.connect(store, name, members.index(self.rank), len(members))
        return self._connections.group(name, members, lambda rank: hopeless((rank,)))

    def refuse(self, name: str) -> None:
        """A group will not be built here: close the connections that members have made for it, or still make."""
        self._connections.refuse(name)


def wait(work: dist.Work | Pending, timeout_s: float, abandoned: Callable[[], bool] = lambda: False) -> None:
    """Wait for communication in a group. RuntimeError if it fails, is late or, if it is our own, ``abandoned()``."""
    if isinstance(work, Pending):
        work.wait(timeout_s, abandoned)
    else:
        work.wait(timedelta(seconds=timeout_s))


def release(group: Any) -> None:
    """Close the connections of ``group`` once its collective in progress, if any, is over here."""
    if isinstance(group, PeerGroup):
        group.release()


def disconnect(group: Any) -> None:
    """Close the connections of ``group``, so that both ends notice."""
    if isinstance(group, PeerGroup):
        group.close()
    else:
        nccl.disconnect(group)
