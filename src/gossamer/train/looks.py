"""When a worker looks at the test set with its own model, beside its training."""

from __future__ import annotations

import math

LOOKING = 0.01
"""The share of the training that all workers together spend on it, where nothing else is said."""


class Looks:
    """Every so many steps, or as often as is cheap.

    Where workers wait for each other, a look of one costs all of them its time; so it is their sum that is kept small.
    """

    def __init__(self, every: int, workers: int) -> None:
        self._every, self._share = every, LOOKING / workers
        self._since, self._cost_s = 0.0, math.inf
        self._looked = False

    def expect(self, now: float, cost_s: float) -> None:
        """A guess, before the first look, of what that takes. Of several guesses the lowest counts: a first gradient
        takes long for many reasons."""
        if not self._looked and cost_s < self._cost_s:
            self._since, self._cost_s = now if self._cost_s == math.inf else self._since, cost_s

    def took(self, now: float, cost_s: float) -> None:
        """A look has taken so long."""
        self._since, self._cost_s, self._looked = now, cost_s, True

    def due(self, now: float, step: int) -> bool:
        """Whether to look after this step."""
        if self._every:
            return step % self._every == 0
        return now >= self._since + self._cost_s / self._share
