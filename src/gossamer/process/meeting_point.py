"""Where workers find each other: a key-value store, and what takes its place when it is gone.

The run begins at one store (torchrun's, or rank 0's). Every worker also hosts a small one of its own and leaves its
address there. When the store dies, survivors move to the first of those that answers, in rank order, and come back to
the first one when it does. Nothing in a store is needed to go on training: it only helps to build new connections, so
everybody leaves its own entries anew after a move.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

CONNECT_S = 1.0
RETRY_S = 0.5
POLL_S = 0.005

T = TypeVar("T")


class _PolledStore(dist.Store):
    """The meeting point as the store that torch builds process groups with.

    A wait on a store's connection blocks everything else on it, and a connection for each group is too much: where many
    are opened at once some take seconds. This one asks again and again over the connection there is.
    """

    def __init__(self, point: MeetingPoint, within_s: float) -> None:
        super().__init__()
        self._point, self._within_s = point, within_s

    def set(self, key: str, value: Any) -> None:
        if not self._point.set(key, value):
            raise RuntimeError("the meeting point is out of reach")

    def get(self, key: str) -> bytes:
        until = time.monotonic() + self._within_s
        while time.monotonic() < until:
            found = self._point.get(key)
            if found is not None:
                return found
            time.sleep(POLL_S)
        raise RuntimeError(f"nobody came to {key} in {self._within_s} s")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._point.get(key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        held = self._point.add(key, amount)
        if held is None:
            raise RuntimeError("the meeting point is out of reach")
        return held


class MeetingPoint:
    """One store at a time, out of several."""

    def __init__(self, host: str, port: int, hosting: bool, prefix: str, timeout_s: float) -> None:
        self.prefix = prefix
        self.addresses: list[tuple[str, int]] = [(host, port)]
        self._lock = threading.RLock()
        self._at = 0
        self._tried = 0.0
        self.moved: list[Callable[[], None]] = []
        """Called after a move: everybody leaves its entries anew."""
        self._store: dist.Store | None = dist.TCPStore(
            host, port, None, hosting, timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
        )
        self._own: dist.Store | None = None

    def host_own(self, host: str) -> tuple[str, int]:
        """Start a store in this process; returns its address."""
        own = dist.TCPStore(host, 0, None, True, timedelta(seconds=CONNECT_S), wait_for_workers=False)
        self._own = own
        return host, own.port

    def store(self, within_s: float) -> dist.Store:
        """A store for building a process group, whose members it waits for at most so long."""
        return _PolledStore(self, within_s)

    def get(self, key: str) -> bytes | None:
        return self._ask(lambda store: store.get(self.prefix + key) if store.check([self.prefix + key]) else None)

    def set(self, key: str, value: Any) -> bool:
        """False if no store could be reached."""

        def put(store: dist.Store) -> bool:
            store.set(self.prefix + key, value)
            return True

        return bool(self._ask(put))

    def claim(self, key: str, value: str) -> bytes | None:
        """Set ``key`` if it is not set; returns what it holds then."""
        return self._ask(lambda store: store.compare_set(self.prefix + key, "", value))

    def add(self, key: str, amount: int) -> int | None:
        """Add to a counter; returns what it holds then."""
        return self._ask(lambda store: store.add(self.prefix + key, amount))

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        """The store's answer; None if no store can be reached."""
        with self._lock:
            store = self._reach()
            if store is None:
                return None
            try:
                return question(store)
            except RuntimeError:
                self._store = None
                return None

    def close(self) -> None:
        """Let go of the stores, our own included."""
        with self._lock:
            self._store = self._own = None
            self.addresses = []

    def go_home(self) -> None:
        """Move back to the first store, if it answers again."""
        if self._at == 0 or time.monotonic() - self._tried < RETRY_S:
            return
        self._tried = time.monotonic()
        with contextlib.suppress(RuntimeError):
            home = self._look_up(*self.addresses[0])
            with self._lock:
                self._store, self._at = home, 0
            self._tell()

    def _reach(self) -> dist.Store | None:
        """The present store, or the next that answers."""
        if self._store is not None or time.monotonic() - self._tried < RETRY_S:
            return self._store
        self._tried = time.monotonic()
        for position, (host, port) in enumerate(self.addresses):
            with contextlib.suppress(RuntimeError):
                self._store, self._at = self._look_up(host, port), position
                self._tell()
                return self._store
        return None

    def _tell(self) -> None:
        for call in self.moved:
            call()

    def _look_up(self, host: str, port: int) -> dist.Store:
        """Connect to a store that may not be there; torch would retry, and report every refusal at length."""
        try:
            socket.create_connection((host, port), CONNECT_S).close()
        except OSError as error:
            raise RuntimeError(f"no store at {host}:{port}: {error}") from None
        return self._connect(host, port)

    @staticmethod
    def _connect(host: str, port: int) -> dist.Store:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False)
