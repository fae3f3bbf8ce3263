"""Builds, waits in and closes groups: the one place that knows of both transports, our own and NCCL."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossamer.process.collectives import nccl
from gossamer.process.collectives.group_connections import HOPELESS_CHECK_S, GroupConnections
from gossamer.process.collectives.peer_group import PeerGroup, Pending
from gossamer.process.store.failover_store import FailoverStore

BUILD_TIMEOUT_S = 5.0
"""How long it may take to connect members that are all ready."""

WAIT_S = 0.1
"""How long a worker that waits for others waits in one request to the store."""

MAX_READY = 256
"""Groups that a worker remembers to have said it is ready for; one more forgets the oldest."""

FIRST_POLL_S, POLL_S = 0.002, 0.02
"""How often a worker asks the store whether others have come: first often, since most come at once, then less often."""


class GroupBuilder:
    """Builds the groups of worker ``rank``."""

    def __init__(self, rank: int, store: FailoverStore, connections: GroupConnections) -> None:
        self.rank, self.store, self._connections = rank, store, connections
        self._ready: dict[str, str] = {}
        """What this worker has said to be ready for, oldest first: names of groups, and what it needs each for."""
        self._lock = threading.Lock()
        store.on_move.append(self._republish)

    def _republish(self) -> None:
        """Say in a store that may be new what this worker is ready for.

        A member that still waits for this one looks only there. This one may not wait any more, since it has seen all
        members ready in the earlier store: then nothing else would publish its entry in the new one.
        """
        with self._lock:
            ready = dict(self._ready)
        if ready:
            self.store.set_all({_key(name, self.rank): purpose for name, purpose in ready.items()})

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
            store = self.store.for_group(BUILD_TIMEOUT_S, lambda: hopeless(members))
            return nccl.connect(store, name, members.index(self.rank), len(members))
        return self._connections.group(name, members, lambda rank: hopeless((rank,)))

    def await_ready(
        self, name: str, members: tuple[int, ...], purpose: str, hopeless: Callable[[tuple[int, ...]], bool]
    ) -> dict[int, str]:
        """Wait until all members are ready to build, however long they take; return the ``purpose`` that each gives."""
        awaited, checked, polls = members, time.monotonic(), poll_intervals()
        purposes: dict[int, str] = {}
        with self._lock:
            self._ready[name] = purpose
            if len(self._ready) > MAX_READY:
                del self._ready[next(iter(self._ready))]
        while awaited:
            self.store.set(_key(name, self.rank), purpose)
            keys = [_key(name, member) for member in awaited]
            for member, ready in zip(awaited, self.store.get_all(keys), strict=True):
                if ready is not None:
                    purposes[member] = ready.decode(errors="replace")
            awaited = tuple(member for member in awaited if member not in purposes)
            now = time.monotonic()
            if awaited and now - checked > HOPELESS_CHECK_S:
                checked = now
                if hopeless(awaited):
                    # Members that have seen this worker ready connect to it.
                    self._connections.refuse(name)
                    raise RuntimeError(f"workers {list(awaited)} will not come")
            # The store answers as soon as they are: that is fewer requests than asking often.
            if awaited and not self.store.has_all([_key(name, member) for member in awaited], WAIT_S):
                time.sleep(next(polls))
        return purposes


def _key(name: str, rank: int) -> str:
    """Where worker ``rank`` says that it is ready for the group ``name``."""
    return f"{name}/ready/{rank}"


def poll_intervals() -> Iterator[float]:
    """Yield the seconds to sleep between two looks into the store, from ``FIRST_POLL_S`` to ``POLL_S``."""
    interval_s = FIRST_POLL_S
    while True:
        yield interval_s
        interval_s = min(POLL_S, 1.5 * interval_s)


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
