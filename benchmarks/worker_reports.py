"""How the workers of a benchmark report what they reach, as lines of JSON. Needs nothing but Python."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

POLL_S = 1.0

# Whatever libraries print goes to standard error.
sys.stdout.flush()
_reports = os.dup(1)
os.dup2(2, 1)


def report(at: str, when: float | None = None, **more: Any) -> None:
    """Report that this worker has reached something, now or at another time."""
    line = {"at": at, "time": time.time() if when is None else when, **more}
    os.write(_reports, (json.dumps(line) + "\n").encode())


def end_with_parent(limit_s: float) -> None:
    """Kill this worker and the processes that it started when the benchmark has ended, or after a time."""
    parent, until = os.getppid(), time.monotonic() + limit_s

    def watch() -> None:
        while os.getppid() == parent and time.monotonic() < until:
            time.sleep(POLL_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
