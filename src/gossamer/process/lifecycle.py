"""The phases of a worker's life, shared by everything that has to stop with it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from enum import IntEnum


class Phase(IntEnum):
    """Phases in order; a worker never goes back."""

    TRAINING = 0
    DONE = 1
    """``finish`` was called: no more steps of its own, but it still serves workers that train."""
    STOPPED = 2
    """No worker trains any more: the background part of the method ends."""
    CLOSED = 3
    """Connections and threads are being closed; ``optimizer.step()`` is left alone."""


class TrainingEnded(Exception):
    """What a worker waits for will not happen any more: training has ended."""


class Lifecycle:
    def __init__(self) -> None:
        self.phase = Phase.TRAINING

    def advance(self, phase: Phase) -> None:
        """Enter ``phase``, unless the worker is past it."""
        self.phase = max(self.phase, phase)

    @property
    def done(self) -> bool:
        return self.phase >= Phase.DONE

    @property
    def stopped(self) -> bool:
        return self.phase >= Phase.STOPPED

    @property
    def closed(self) -> bool:
        return self.phase >= Phase.CLOSED


class StepRetry(Exception):
    """The membership changed or has to change: the step in progress is void and is repeated."""


class CommAborted(Exception):
    """A collective in the background was lost with its generation."""


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C for the moment: torchrun repeats it to workers that are leaving because of it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
