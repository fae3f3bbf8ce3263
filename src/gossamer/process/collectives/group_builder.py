"""Builds, waits in and closes process groups: the one place that knows of both transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gossamer.process.collectives import gloo, nccl
from gossamer.process.store.failover_store import FailoverStore

BUILD_TIMEOUT_S = 5.0
"""How long it may take to connect members that are all ready."""

FIRST_POLL_S, POLL_S = 0.002, 0.02
"""How often a worker asks the store whether others have come: first often, since most come at once, then less often."""

HOPELESS_CHECK_S = 0.3
"""How often a worker that waits for members checks whether they can still come."""


class GroupBuilder:
    """Builds the process groups of worker ``rank`` over the store."""

    def __init__(self, rank: int, store: FailoverStore) -> None:
        self.rank, self.store = rank, store

    def build(
        self,
        name: str,
        members: tuple[int, ...],
        *,
        hopeless: Callable[[tuple[int, ...]], bool],
        on_gpu: bool = False,
        low_priority: bool = False,
        timeout_s: float = BUILD_TIMEOUT_S,
    ) -> Any:
        """Connect ``members``, who all call this with the same unique ``name``.

        RuntimeError if they do not connect, or once ``hopeless(awaited members)`` says that some will not come.
        """
        store = self.store.for_group(timeout_s, lambda: hopeless(members))
        group_rank = members.index(self.rank)
        if on_gpu:
            return nccl.connect(store, name, group_rank, len(members))
        return gloo.connect(store, name, group_rank, len(members), BUILD_TIMEOUT_S, low_priority)

    def await_ready(
        self, name: str, members: tuple[int, ...], purpose: str, hopeless: Callable[[tuple[int, ...]], bool]
    ) -> dict[int, str]:
        """Wait until all members are ready to build, however long they take; return the ``purpose`` that each gives.

        Gloo itself cannot be told that a member will not come, and blocks until its timeout.
        """
        awaited, checked, polls = members, time.monotonic(), poll_intervals()
        purposes: dict[int, str] = {}
        while awaited:
            self.store.set(f"{name}/ready/{self.rank}", purpose)
            for member in awaited:
                ready = self.store.get(f"{name}/ready/{member}")
                if ready is not None:
                    purposes[member] = ready.decode(errors="replace")
            awaited = tuple(member for member in awaited if member not in purposes)
            now = time.monotonic()
            if awaited and now - checked > HOPELESS_CHECK_S:
                checked = now
                if hopeless(awaited):
                    raise RuntimeError(f"workers {list(awaited)} will not come")
            if awaited:
                time.sleep(next(polls))
        return purposes


def poll_intervals() -> Iterator[float]:
    """Yield the seconds to sleep between two looks into the store, from ``FIRST_POLL_S`` to ``POLL_S``."""
    interval_s = FIRST_POLL_S
    while True:
        yield interval_s
        interval_s = min(POLL_S, 1.5 * interval_s)


def wait(group: Any, work: dist.Work | gloo.Exchange, timeout_s: float, abandoned: Callable[[], bool]) -> None:
    """Wait for communication in ``group``. RuntimeError if it fails, is late or is ``abandoned()``."""
    if isinstance(work, gloo.Exchange):
        work.wait(timeout_s)
    elif nccl.is_nccl(group):
        work.wait(timedelta(seconds=timeout_s))
    else:
        gloo.wait(group, work, timeout_s, abandoned)


def disconnect(group: Any) -> None:
    """Close the connections of ``group``, so that both ends notice."""
    (nccl if nccl.is_nccl(group) else gloo).disconnect(group)
