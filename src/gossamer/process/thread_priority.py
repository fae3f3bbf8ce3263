"""Thread priorities: on too few cores the training runs before the background communication."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache

import torch

NICENESS_STEP = 10
"""A thread that is nicer by 10 gets a tenth of a contended core, and a thread that wakes up preempts it."""


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of the threads it starts from now on.

    Only for threads that hold nothing the training may wait for; ``PriorityBoost`` is for the others. Does nothing on
    systems without a priority per thread.
    """
    if sys.platform == "linux":
        # On Linux every thread has a niceness of its own, 19 at most, and its children inherit it.
        thread = threading.get_native_id()
        _set_niceness(thread, _niceness(thread) + NICENESS_STEP)


class PriorityBoost:
    """A thread of low priority that gets the training's priority while the training waits for it.

    A thread of low priority may not run for a second on a busy machine, and what it holds then (the lock on the
    parameters) blocks the training. So the waiting thread boosts it: priority inheritance. Raising a priority takes a
    right that not every user has, and a thread with worker threads of its own could not be boosted as a whole: in both
    cases the priority is never lowered.
    """

    def __init__(self) -> None:
        self._thread: int | None = None

    def enter(self) -> None:
        """Lower the priority of the calling thread."""
        if torch.get_num_threads() == 1 and _can_raise_priority():
            lower_priority()
            self._thread = threading.get_native_id()

    def leave(self) -> None:
        """The thread is about to end."""
        self._thread = None

    @contextlib.contextmanager
    def boosted(self) -> Iterator[None]:
        """Give the thread the caller's priority inside this block."""
        thread = self._thread
        if thread is None:
            yield
            return
        low = _niceness(thread)
        _set_niceness(thread, _niceness(threading.get_native_id()))
        try:
            yield
        finally:
            if self._thread is not None:
                _set_niceness(thread, low)


@lru_cache(maxsize=1)
def _can_raise_priority() -> bool:
    """Return whether this process may raise a priority that it lowered; tried with a short-lived thread."""
    raised = False

    def attempt() -> None:
        nonlocal raised
        thread = threading.get_native_id()
        before = _niceness(thread)
        lower_priority()
        raised = _niceness(thread) > before and _set_niceness(thread, before)

    if sys.platform == "linux":
        trial = threading.Thread(target=attempt)
        trial.start()
        trial.join()
    return raised


def _niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def _set_niceness(thread: int, niceness: int) -> bool:
    """Return whether the system allowed it."""
    try:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except OSError:
        return False
    return True
