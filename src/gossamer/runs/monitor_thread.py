"""The monitor as a thread of one of the workers, while that trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gossamer.runs.monitor import POLL_S, RunMonitor
from gossamer.runs.status import DONE, FAILED, LEFT

LAST_POLL_S = 0.05
"""How often the last status of the workers is looked for."""


class MonitorThread:
    def __init__(
        self,
        monitor: RunMonitor,
        why_gone: Callable[[int], str],
        show: Callable[[list[str]], None],
        poll_s: float = POLL_S,
    ) -> None:
        """``why_gone(rank)``: why that worker is dead, empty if it is not; ``show``: called with new events."""
        self.monitor, self._why_gone, self._show = monitor, why_gone, show
        self._poll_s = poll_s
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer-monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._finished.wait(self._poll_s):
            self._poll()

    def _poll(self) -> None:
        events = self.monitor.poll()
        for rank in range(len(self.monitor.status)):
            why = self._why_gone(rank)
            if why and self._missing(rank):
                events.append(self.monitor.mark_gone(rank, why))
        self._show(events)

    def _missing(self, rank: int) -> bool:
        """Whether a worker is neither dead nor at its end, as far as is known."""
        return rank not in self.monitor.gone and self.monitor.status[rank].state not in (DONE, FAILED, LEFT)

    def missing(self) -> list[int]:
        return [rank for rank in range(len(self.monitor.status)) if self._missing(rank)]

    def stop(self) -> None:
        """End the thread."""
        self._finished.set()
        self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """End the thread, and wait here for the last status of every worker; return whether they are all there."""
        self.stop()
        until = time.monotonic() + timeout_s
        while True:
            self._poll()
            if not self.missing():
                return True
            if time.monotonic() > until:
                return False
            time.sleep(LAST_POLL_S)

    def finish(self, timeout_s: float) -> None:
        """End the thread and wait for the last status of every worker; those without one are dead."""
        self.wait(timeout_s)
        for rank in self.missing():
            self.monitor.mark_gone(rank, "no last status")
