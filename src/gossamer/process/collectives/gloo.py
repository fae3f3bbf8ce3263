"""Gloo process groups of our own, independent of the user's. All uses of torch's private gloo API are in this file."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_VECTOR, _TRAILER, _RECEIPT, _NEVER_SENT = 2, 3, 4, 9
"""Tags of the messages of a pair exchange, and one under which nothing is ever sent."""

NUM_WORDS = 12
"""Numbers that travel along with a vector, at most."""

_NO_TIMEOUT = timedelta(days=1)
"""Gloo's own timeout after connecting: deadlines are ours to set."""

_CONNECT_FACTOR = 5
"""Gloo takes up to 5 times its timeout to connect."""

_POLL_S = 0.1
_NOTICE_S = 0.5
"""How long a group's thread may take to notice that the group's connections were closed."""

_NICENESS_STEP = 10
"""A thread that is nicer by 10 gets a tenth of a contended core, and a thread that wakes up preempts it."""

_stuck: list[tuple[Any, dist.Work]] = []
"""Groups whose thread still waits in an abandoned collective: destroying one would block."""


@lru_cache(maxsize=2)
def _device(low_priority: bool) -> Any:
    """Return the network device that all groups of one priority share: one thread instead of one per group."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    return dist.ProcessGroupGloo.create_default_device()


def connect(store: dist.Store, name: str, rank: int, size: int, timeout_s: float, low_priority: bool = False) -> Any:
    """Connect the ``size`` members that use ``name`` to a process group; RuntimeError if that takes too long.

    ``low_priority``: the group's threads run at low priority. They hold nothing that the training may wait for.
    """
    if low_priority:
        # The group's threads inherit the priority of the thread that makes them.
        with ThreadPoolExecutor(1, initializer=_lower_priority) as executor:
            return executor.submit(_connect, store, name, rank, size, timeout_s, low_priority).result()
    return _connect(store, name, rank, size, timeout_s, low_priority)


def _connect(store: dist.Store, name: str, rank: int, size: int, timeout_s: float, low_priority: bool) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device(low_priority)]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s) / _CONNECT_FACTOR
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)
    group._set_default_timeout(_NO_TIMEOUT)
    return group


def _lower_priority() -> None:
    """Lower the priority of the calling thread, and of the threads it starts: on Linux threads have their own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, niceness + _NICENESS_STEP)


class Exchange:
    """A member of a group sends a vector to one member and receives one from another, which may be the same.

    ``words``, at most ``NUM_WORDS`` numbers, travel along with the vector.

    When a connection breaks, gloo reports it to a receive that has not begun, but not to one that is half complete:
    that one waits until its timeout. So each vector is followed by a short trailer, with the words, which the receiver
    answers with a short receipt. Both ends wait for trailer and receipt first: once these have arrived, so have the
    vectors.
    """

    def __init__(
        self,
        group: Any,
        sent: Tensor | None,
        received: Tensor | None,
        to: int | None = None,
        source: int | None = None,
        words: Sequence[float] = (),
        received_words: list[float] | None = None,
    ) -> None:
        """``to``, ``source``: ranks in ``group``, in a group of two by default the other.

        ``None`` in place of a vector: nothing is sent, or received. ``received_words`` gets the other's words.
        """
        self._group, self._received_words = group, received_words
        peer = 1 - group.rank()
        self._to, self._source = peer if to is None else to, peer if source is None else source
        self._trailer_in, self._receipt = torch.zeros(NUM_WORDS, dtype=torch.float64), torch.zeros(1)
        trailer = torch.zeros(NUM_WORDS, dtype=torch.float64)
        trailer[: len(words)] = torch.tensor(list(words), dtype=torch.float64)
        self._incoming: list[dist.Work] = []
        self._outgoing: list[dist.Work] = []
        self._receipts: list[dist.Work] = []
        # Post receives before sends: the other order halves the bandwidth of a slow link.
        if received is not None:
            vector = group.recv([received], self._source, _VECTOR)
            self._incoming = [group.recv([self._trailer_in], self._source, _TRAILER), vector]
        if sent is not None:
            self._receipts = [group.recv([self._receipt], self._to, _RECEIPT)]
            self._outgoing = [group.send([sent], self._to, _VECTOR), group.send([trailer], self._to, _TRAILER)]

    def wait(self, timeout_s: float) -> None:
        """Wait until the vectors have arrived; else RuntimeError, and the connection is closed."""
        until = time.monotonic() + timeout_s

        def finish(work: dist.Work) -> None:
            work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))

        for work in self._incoming:
            finish(work)
        if self._incoming:
            self._outgoing.append(self._group.send([torch.zeros(1)], self._source, _RECEIPT))
        for work in (*self._receipts, *self._outgoing):
            finish(work)
        if self._received_words is not None:
            self._received_words[:] = self._trailer_in.tolist()


def wait(group: Any, work: dist.Work, timeout_s: float, abandoned: Callable[[], bool]) -> None:
    """Wait for a collective of ``group``.

    RuntimeError if it fails, takes longer than ``timeout_s``, or soon after ``abandoned()``, for instance because the
    group was closed, even if gloo does not notice (see ``Exchange``).
    """
    done = threading.Event()
    work.get_future().add_done_callback(lambda _: done.set())
    until = time.monotonic() + timeout_s
    while not done.wait(_POLL_S):
        late = time.monotonic() > until
        if late or (abandoned() and not done.wait(_NOTICE_S)):
            _stuck[:] = [(group, work), *(entry for entry in _stuck if not entry[1].is_completed())]
            raise RuntimeError(f"not done in {timeout_s:.0f} s" if late else "the group was closed")
    work.wait()


@atexit.register
def _leak_stuck_groups() -> None:
    """Keep the interpreter from destroying stuck groups at its exit, where it would wait for them."""
    for group, work in _stuck:
        if not work.is_completed():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def disconnect(group: Any) -> None:
    """Close the connections to all other members, so that both ends notice.

    Gloo has no call for this; a receive that times out does it.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
