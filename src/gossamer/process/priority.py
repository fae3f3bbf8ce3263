"""Who gets a core when there are not enough: the training, before what runs beside it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import lru_cache

NICER = 10
"""A thread that is so much nicer gets a tenth of a core that another wants, and one that wakes up takes it from it."""


def give_way() -> None:
    """Let the calling thread, and those it starts from now on, give way to the threads that train.

    For threads that hold nothing the training may wait for; the others are ``Modest``. Does nothing where threads have
    no priorities of their own.
    """
    _set_niceness(threading.get_native_id(), _usual() + NICER)


class Modest:
    """A thread that gives way to the training, except while that waits for it.

    Whoever gives way may not get a core for a second where many others want one. What it holds then, nobody gets: so it
    is called back. Where a thread cannot be called back, since that takes rights that not everybody has, it does not
    give way in the first place.
    """

    def __init__(self) -> None:
        self._thread: int | None = None

    def begin(self) -> None:
        """It is the calling thread."""
        if _can_be_called_back():
            self._thread = threading.get_native_id()
            give_way()

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """The training waits for it."""
        if self._thread is None:
            yield
            return
        _set_niceness(self._thread, _usual())
        try:
            yield
        finally:
            _set_niceness(self._thread, _usual() + NICER)


@lru_cache(maxsize=1)
def _can_be_called_back() -> bool:
    """Tried out with a thread that nobody needs."""
    outcome: list[bool] = []

    def try_out() -> None:
        thread = threading.get_native_id()
        outcome.append(_set_niceness(thread, _usual() + NICER) and _set_niceness(thread, _usual()))

    trial = threading.Thread(target=try_out)
    trial.start()
    trial.join()
    return outcome[0]


@lru_cache(maxsize=1)
def _usual() -> int:
    """The niceness of this process."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def _set_niceness(thread: int, niceness: int) -> bool:
    """Whether that was possible."""
    if sys.platform != "linux":
        return False
    try:
        # On Linux every thread has a niceness, of 19 at most, and hands it down.
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except OSError:
        return False
    return True
