"""How long a step's compute takes: as long as it does, several times as long, or as long as was asked for."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

from gossamer.hardware import ComputeTimes


class Pace:
    """One worker's. What it adds is waiting, so that on shared cores it takes no time from the others."""

    def __init__(
        self, compute: ComputeTimes, waits: bool, rank: int, rng: np.random.Generator, stop: threading.Event
    ) -> None:
        self.compute, self.waits, self.rank, self.rng, self.stop = compute, waits, rank, rng, stop
        self.factor = float(compute.factor[rank])

    @property
    def natural(self) -> bool:
        """Whether steps take just what they take."""
        return not self.waits and self.factor == 1.0

    def keep(self, began: float) -> None:
        """Wait until the compute of a step that began then has taken as long as it shall."""
        if self.natural:
            return
        took = time.monotonic() - began
        wanted = self.compute.draw(self.rank, self.rng) if self.waits else self.factor * took
        if wanted > took:
            self.stop.wait(wanted - took)


class StepMeter:
    """How long steps take from one to the next, once connections are made and everything runs."""

    NEWEST = 1000

    def __init__(self, period: int = 1) -> None:
        self.period = period
        """Everything recurs after so many steps: only whole periods are averaged."""
        self._ended: deque[float] = deque(maxlen=self.NEWEST)

    def add(self, now: float) -> None:
        """A step has ended."""
        self._ended.append(now)

    def mean_s(self) -> float:
        """On average; 0 before there are two of them."""
        ended = list(self._ended)
        count = len(ended) - 1
        if len(ended) < self.NEWEST:
            count -= len(ended) // 4
        if count > self.period:
            count -= count % self.period
        return (ended[-1] - ended[-1 - count]) / count if count > 0 else 0.0
