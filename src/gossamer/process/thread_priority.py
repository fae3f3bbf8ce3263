"""Who gets a core when there are not enough: the training, before what runs beside it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache

import torch

NICER = 10
"""A thread that is so much nicer gets a tenth of a core that another wants, and one that wakes up takes it from it."""


def lower_priority() -> None:
    """Let the calling thread, and those it starts from now on, give way to the threads that train.

    For threads that hold nothing the training may wait for; for others there is ``PriorityBoost``. Does nothing where
    threads have no priorities of their own.
    """
    if sys.platform == "linux":
        # On Linux every thread has a niceness, of 19 at most, and hands it down.
        thread = threading.get_native_id()
        _set_niceness(thread, _niceness(thread) + NICER)


class PriorityBoost:
    """Lets a thread give way to the training, except while that waits for it.

    Whoever gives way may not get a core for a second where many others want one. What it holds then, nobody gets: so it
    is called back. Where it cannot be called back, since that takes rights that not everybody has, or since it has
    threads of its own that would have to be, it does not give way in the first place.
    """

    def __init__(self) -> None:
        self._thread: int | None = None

    def begin(self) -> None:
        """It is the calling thread."""
        if torch.get_num_threads() == 1 and _can_be_called_back():
            lower_priority()
            self._thread = threading.get_native_id()

    def end(self) -> None:
        """The thread is about to end."""
        self._thread = None

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """The calling thread waits for it, and lends it its own priority."""
        thread = self._thread
        if thread is None:
            yield
            return
        modest = _niceness(thread)
        _set_niceness(thread, _niceness(threading.get_native_id()))
        try:
            yield
        finally:
            if self._thread is not None:
                _set_niceness(thread, modest)


@lru_cache(maxsize=1)
def _can_be_called_back() -> bool:
    """Tried out with a thread that nobody needs."""
    came_back = False

    def try_out() -> None:
        nonlocal came_back
        thread = threading.get_native_id()
        usual = _niceness(thread)
        lower_priority()
        came_back = _niceness(thread) > usual and _set_niceness(thread, usual)

    if sys.platform == "linux":
        trial = threading.Thread(target=try_out)
        trial.start()
        trial.join()
    return came_back


def _niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def _set_niceness(thread: int, niceness: int) -> bool:
    """Whether that was possible."""
    try:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except OSError:
        return False
    return True
