"""An executor of one daemon thread: a call that hangs for ever blocks neither its caller nor the end of the process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonExecutor:
    """Runs submitted calls one after the other in one daemon thread."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue ``call`` behind those submitted before it."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def close(self, timeout_s: float = 0.0) -> bool:
        """Accept no more calls, wait at most ``timeout_s`` for the queued ones; return whether the thread has ended."""
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            # An idle thread holds no references, so that a store that nobody uses any more is closed.
            del item, call, future
