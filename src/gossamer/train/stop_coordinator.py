"""Stops a run between two steps, and workers in lockstep after the same step.

A worker that is asked to stop publishes the last step it has begun, and begins no other before it knows the last steps
of all others alive; the largest is the last step for everybody. So no worker waits in a step that others never make,
and all of them can be resumed from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from gossamer.runs.status import StatusBoard

AGREE_TIMEOUT_S = 10.0
"""How long a worker that is asked to stop waits for the others' last steps."""


LEAVE_AFTER_S = 0.5
"""How long a worker that is told to leave waits for others that are told the same."""


class StopCoordinator:
    """Decides for one worker whether its next step is made."""

    def __init__(self, rank: int, everybody: Collection[int], lockstep: bool) -> None:
        self.rank, self.lockstep = rank, lockstep
        self.everybody = everybody
        """The ranks that belong to the run."""
        self.stop_requested = threading.Event()
        """Set from anywhere, also from a signal handler."""
        self.leave_requested_at: float | None = None
        """When this worker was told to leave for good."""
        self._leaves = False
        self._lock = threading.Lock()
        self._num_begun = 0
        self._num_steps: int | None = None
        self._decided = threading.Event()

    def may_begin(self, step: int) -> bool:
        """Return whether to make step number ``step``, counted from 0. Called before each."""
        with self._lock:
            if not self.stop_requested.is_set():
                self._num_begun = step + 1
                return True
        if self.lockstep:
            self._decided.wait(AGREE_TIMEOUT_S)
        return self._num_steps is not None and step < self._num_steps

    @property
    def shall_leave(self) -> bool:
        """Whether this worker shall leave for good before its next step."""
        return self._leaves and not self.stop_requested.is_set()

    def _poll_leaving(self, board: StatusBoard, gone: Callable[[int], bool]) -> None:
        """Let this worker leave if it was told to. If all were told so, the run stops instead."""
        if self.leave_requested_at is None or self._leaves or self.stop_requested.is_set():
            return
        board.publish_leaving(self.rank)
        if time.monotonic() - self.leave_requested_at < LEAVE_AFTER_S:
            return
        if all(other == self.rank or gone(other) or board.is_leaving(other) for other in self.everybody):
            self.stop_requested.set()
        self._leaves = True

    def poll(self, board: StatusBoard, gone: Callable[[int], bool]) -> None:
        """Read whether anybody asked to stop, and agree on the last step. Runs in the status thread."""
        self._poll_leaving(board, gone)
        if not self.stop_requested.is_set() and board.stop_requested():
            self.stop_requested.set()
        if not self.stop_requested.is_set() or self._decided.is_set():
            return
        board.request_stop()
        if not self.lockstep:
            self._decide(0)
            return
        with self._lock:
            last = self._num_begun
        board.publish_last_step(self.rank, last)
        until = time.monotonic() + AGREE_TIMEOUT_S
        awaited = set(self.everybody) - {self.rank}
        while awaited and time.monotonic() < until:
            for other in list(awaited):
                step = board.last_step(other)
                if step is not None or other not in self.everybody or gone(other):
                    last = max(last, step or 0)
                    awaited.remove(other)
            time.sleep(0.02)
        self._decide(last)

    def _decide(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._decided.set()
