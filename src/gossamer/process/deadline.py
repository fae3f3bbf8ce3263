"""How long to wait, learned from how long things took."""

from __future__ import annotations

from collections import deque
from statistics import median


class Deadline:
    """A deadline that nobody has to guess: several times the usual, plus several times its spread."""

    MEMORY = 64
    ENOUGH = 5

    def __init__(self, first_s: float, least_s: float) -> None:
        self.first_s, self.least_s = first_s, least_s
        self._took: deque[float] = deque(maxlen=self.MEMORY)

    def observe(self, took_s: float) -> None:
        self._took.append(took_s)

    @property
    def seconds(self) -> float:
        if len(self._took) < self.ENOUGH:
            return self.first_s
        usual = median(self._took)
        spread = median(abs(took - usual) for took in self._took)
        return max(self.least_s, 4 * usual + 10 * spread)
