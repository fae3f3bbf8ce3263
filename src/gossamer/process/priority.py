"""Who gets a core when there are not enough: the training, before what runs beside it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

NICENESS = 10
"""A thread of this niceness gets a tenth of a core that another wants, and one that wakes up takes it from it."""


def give_way() -> None:
    """Let the calling thread, and those it starts from now on, give way to the threads that train.

    Does nothing where threads have no priorities of their own.
    """
    if sys.platform == "linux":
        # On Linux every thread has a niceness, and hands it down.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
