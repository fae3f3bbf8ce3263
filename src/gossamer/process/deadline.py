"""Deadlines learned from how long things took."""

from __future__ import annotations

from collections import deque
from statistics import median


class Deadline:
    """A deadline of 4 medians plus 10 median absolute deviations of the observed durations."""

    WINDOW = 64
    MIN_OBSERVATIONS = 5

    def __init__(self, initial_s: float, min_s: float) -> None:
        self.initial_s, self.min_s = initial_s, min_s
        self._durations: deque[float] = deque(maxlen=self.WINDOW)

    def observe(self, duration_s: float) -> None:
        self._durations.append(duration_s)

    @property
    def seconds(self) -> float:
        if len(self._durations) < self.MIN_OBSERVATIONS:
            return self.initial_s
        usual = median(self._durations)
        spread = median(abs(duration - usual) for duration in self._durations)
        return max(self.min_s, 4 * usual + 10 * spread)
