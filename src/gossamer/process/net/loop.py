"""A thread that serves many sockets."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

JOIN_TIMEOUT_S = 5.0

logger = logging.getLogger("gossamer")


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Timer:
    """A call at a time to come."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        # The timer stays in the queue, what it would have called goes.
        self.call = None


class Loop:
    """Calls back, in one daemon thread, when sockets are ready and timers are due. Callbacks must not block."""

    def __init__(self, name: str) -> None:
        # Not epoll: that would be one more descriptor per worker, for few sockets.
        self._selector = selectors.PollSelector() if hasattr(selectors, "PollSelector") else selectors.DefaultSelector()
        # One descriptor, where a pipe has two. -1: closed.
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._closing = threading.Event()
        self.on_close: list[Callable[[], None]] = []
        """Called in the thread before it ends."""
        self._selector.register(self._waker, READ, self._drain)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # From any thread

    @property
    def is_current(self) -> bool:
        """Whether this is the thread of the loop."""
        return threading.current_thread() is self._thread

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call ``call()`` in the thread."""
        self._calls.append(call)
        if not self.is_current:
            self._wake()

    def close(self) -> None:
        """End the thread; wait for that, unless this is it."""
        self._closing.set()
        self._wake()
        if not self.is_current:
            self._thread.join(JOIN_TIMEOUT_S)

    def _wake(self) -> None:
        # Its number may be another file's once it is closed.
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if self._waker >= 0:
                os.eventfd_write(self._waker, 1)

    # From the thread itself

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._numbers), timer))
        return timer

    def watch(self, source: HasFileno, events: int, callback: Callable[[int], None]) -> None:
        """Call ``callback(events)`` whenever some of ``events`` (READ, WRITE) are there; replaces an earlier watch."""
        if source in self._selector.get_map():
            self._selector.modify(source, events, callback)
        else:
            self._selector.register(source, events, callback)

    def unwatch(self, source: HasFileno) -> None:
        """Call back no more. Before the socket is closed."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _drain(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)

    def _run(self) -> None:
        while not self._closing.is_set():
            wait_s = 0.0 if self._calls else self._timers[0][0] - time.monotonic() if self._timers else None
            ready = self._selector.select(None if wait_s is None else max(wait_s, 0.0))
            for key, events in ready:
                # An earlier callback may have closed this one's socket.
                if self._selector.get_map().get(key.fd) is key and not self._guard(lambda: key.data(events)):  # noqa: B023
                    self.unwatch(key.fileobj)  # type: ignore[arg-type]
            while self._timers and self._timers[0][0] <= time.monotonic():
                call = heapq.heappop(self._timers)[2].call
                if call is not None:
                    self._guard(call)
            self._run_calls()
        self._run_calls()
        for call in self.on_close:
            self._guard(call)
        self._selector.close()
        with self._wake_lock:
            os.close(self._waker)
            self._waker = -1

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):
            self._guard(self._calls.popleft())

    def _guard(self, call: Callable[[], None]) -> bool:
        """A fault in the service of one connection must not end that of all others."""
        try:
            call()
        except Exception:
            logger.exception("a callback of %s failed", self._thread.name)
            return False
        return True
