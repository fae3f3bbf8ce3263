"""How long steps of a worker take, and for how much of that its process did not run: the machine may be busy."""

from __future__ import annotations

import threading
import time

TICK_S = 0.05


class StepWatch(threading.Thread):
    """Times the steps of this process."""

    def __init__(self) -> None:
        super().__init__(name="step-watch", daemon=True)
        self.last = time.monotonic()
        self.starved_s = 0.0
        """For how long this process did not run, in the step in progress."""

    def stepped(self) -> tuple[float, float]:
        """A step has ended: return how long it took, and how much of that the process did not run."""
        now = time.monotonic()
        step_s, starved_s = now - self.last, self.starved_s
        self.last, self.starved_s = now, 0.0
        return step_s, starved_s

    def run(self) -> None:
        while True:
            slept = time.monotonic()
            time.sleep(TICK_S)
            now = time.monotonic()
            self.starved_s += max(0.0, now - slept - 2 * TICK_S)
            self.ticked(now)

    def ticked(self, now: float) -> None:
        """Called twenty times a second."""
