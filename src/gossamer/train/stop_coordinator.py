"""Where a run can be stopped: between two steps, and where workers wait for each other after the same step for all.

A worker that is asked to stop says which step it has begun, and begins no further one before it has heard that of all
others that are alive; the last of these is the last for everybody. So nobody is left waiting in a step that others will
never make, and all of them can be resumed from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gossamer.train.status import StatusBoard

PATIENCE_S = 10.0
"""How long a worker that is asked to stop waits to hear from the others."""


class StopCoordinator:
    """Lets one worker's training pass from step to step, until it is asked to stop."""

    def __init__(self, rank: int, workers: int, together: bool) -> None:
        self.rank, self.together = rank, together
        self.others = [other for other in range(workers) if other != rank]
        self.asked = threading.Event()
        """Set from anywhere, a signal handler included."""
        self._lock = threading.Lock()
        self._begun = 0
        self._last: int | None = None
        self._decided = threading.Event()

    def passes(self, step: int) -> bool:
        """Whether step number ``step``, counted from 0, shall be made; called before each."""
        with self._lock:
            if not self.asked.is_set():
                self._begun = step + 1
                return True
        if self.together:
            self._decided.wait(PATIENCE_S)
        return self._last is not None and step < self._last

    def poll(self, status_board: StatusBoard, gone: Callable[[int], bool]) -> None:
        """Hear whether somebody asked, and agree with the others on the last step; called beside the training."""
        if not self.asked.is_set() and status_board.asked_to_stop():
            self.asked.set()
        if not self.asked.is_set() or self._decided.is_set():
            return
        status_board.ask_to_stop()
        if not self.together:
            self._decide(0)
            return
        with self._lock:
            last = self._begun
        status_board.bound(self.rank, last)
        until = time.monotonic() + PATIENCE_S
        waiting = set(self.others)
        while waiting and time.monotonic() < until:
            for other in list(waiting):
                bound = status_board.bound_of(other)
                if bound is not None or gone(other):
                    last = max(last, bound or 0)
                    waiting.remove(other)
            time.sleep(0.02)
        self._decide(last)

    def _decide(self, last: int) -> None:
        self._last = last
        self._decided.set()
