"""A thread that does one thing after the other for whoever asks, and that nobody has to wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonExecutor:
    """An executor of one thread, in which what hangs for ever holds up neither its owner nor the process's end."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` done, after what was submitted before it."""
        answer: Future[T] = Future()
        self._calls.put((call, answer))
        return answer

    def close(self, within_s: float = 0.0) -> bool:
        """Nothing more is submitted; waits so long for what was, and says whether that is over."""
        self._calls.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            call, answer = item
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(call())
                except BaseException as error:
                    answer.set_exception(error)
            # An idle thread holds on to nothing: a store that nobody asks any more is closed.
            del item, call, answer
