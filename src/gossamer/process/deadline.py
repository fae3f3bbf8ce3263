"""Deadlines learned from how long things took."""

from __future__ import annotations

from statistics import median


class Deadline:
    """A deadline of 4 medians plus 10 median absolute deviations of the observed durations.

    Several threads observe and ask.
    """

    WINDOW = 64
    MIN_OBSERVATIONS = 5

    def __init__(self, initial_s: float, min_s: float) -> None:
        self.initial_s, self.min_s = initial_s, min_s
        self._durations: tuple[float, ...] = ()

    def observe(self, duration_s: float) -> None:
        # A new tuple: another thread may be reading the old one.
        self._durations = (*self._durations[1 - self.WINDOW :], duration_s)

    @property
    def seconds(self) -> float:
        durations = self._durations
        if len(durations) < self.MIN_OBSERVATIONS:
            return self.initial_s
        usual = median(durations)
        spread = median(abs(duration - usual) for duration in durations)
        return max(self.min_s, 4 * usual + 10 * spread)
