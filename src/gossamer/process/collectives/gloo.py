"""Gloo process groups of our own making, beside whatever the user has.

Everything here that torch keeps private is in this file.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.process.thread_priority import lower_priority

_VECTOR, _END, _THANKS, _NEVER_SENT = 2, 3, 4, 9
"""Tags: of vectors that are traded, of what follows them, and one under which nothing is ever sent."""

_FOR_EVER = timedelta(days=1)
"""For gloo itself: how long is waited is for us to say."""

_CONNECTING = 5
"""Gloo takes so many times its timeout to connect."""

_LOOK_S = 0.1
_LAST_WORDS_S = 0.5
"""So long after a group was severed its thread has noticed, or never will."""

_stuck: list[tuple[Any, dist.Work]] = []
"""Groups whose thread has not noticed that nobody waits for it any more: whoever destroyed one would wait for it."""


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
        with ThreadPoolExecutor(1, initializer=lower_priority) as yielding:
            return yielding.submit(_make_group, store, name, rank, size, timeout_s, beside).result()
    return _make_group(store, name, rank, size, timeout_s, beside)


def _make_group(store: dist.Store, name: str, rank: int, size: int, timeout_s: float, beside: bool) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device(beside)]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s) / _CONNECTING
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)
    # Building is over; from now on members may be as late as they like.
    group._set_default_timeout(_FOR_EVER)
    return group


class PairExchange:
    """Two members, alone in a group, send each other a vector.

    When a connection breaks gloo tells those who wait for a message that has not begun. Whoever waits for one that is
    half through is not told, and waits until its time is up. So a short message goes behind each vector, and another
    back when that has come: these are waited for, and when they are there so are the vectors.
    """

    def __init__(self, group: Any, sent: Tensor, received: Tensor) -> None:
        self._group, self._other = group, 1 - group.rank()
        self._words = torch.zeros(4)
        end, thanks, *_ = self._words.split(1)
        # Receives go first: sends that do halve the bandwidth of a slow link.
        self._vector_in = group.recv([received], self._other, _VECTOR)
        self._end_in = group.recv([end], self._other, _END)
        self._thanks_in = group.recv([thanks], self._other, _THANKS)
        self._vector_out = group.send([sent], self._other, _VECTOR)
        self._end_out = group.send([self._words[2:3]], self._other, _END)

    def wait(self, within_s: float) -> None:
        """Raises RuntimeError if it fails, or takes longer; the connection is closed then."""
        until = time.monotonic() + within_s

        def finish(work: dist.Work) -> None:
            work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))

        finish(self._end_in)
        finish(self._vector_in)
        thanks_out = self._group.send([self._words[3:]], self._other, _THANKS)
        finish(self._thanks_in)
        for work in (self._vector_out, self._end_out, thanks_out):
            finish(work)


def wait(group: Any, work: dist.Work, within_s: float, over: Callable[[], bool]) -> None:
    """Wait for a collective operation of ``group``. Raises RuntimeError if it fails or takes longer, and soon after it
    is ``over``, for instance since ``group`` was severed, even if gloo does not notice (see ``PairExchange``)."""
    done = threading.Event()
    work.get_future().add_done_callback(lambda _: done.set())
    until = time.monotonic() + within_s
    while not done.wait(_LOOK_S):
        late = time.monotonic() > until
        if late or (over() and not done.wait(_LAST_WORDS_S)):
            _stuck[:] = [(group, work), *(entry for entry in _stuck if not entry[1].is_completed())]
            raise RuntimeError(f"not done in {within_s:.0f} s" if late else "it is over for this group")
    work.wait()


@atexit.register
def _abandon() -> None:
    """Keep the interpreter from destroying groups that are stuck when it ends."""
    for group, work in _stuck:
        if not work.is_completed():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def sever(group: Any) -> None:
    """Close the connections to all other members, so that they and we notice.

    Gloo has no call for it; a receive that times out does it.
    """
    for other in range(group.size()):
        if other != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.zeros(1)], other, _NEVER_SENT).wait(timedelta(milliseconds=1))
