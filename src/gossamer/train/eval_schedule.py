"""When a worker eval_schedule at the test set with its own model, beside its training."""

from __future__ import annotations

import math

LOOKING = 0.01
"""Where nothing else is said, all workers' eval_schedule together take this share of the time of one."""

GUESSES = 5
"""So many gradients are taken the time of before the first look."""


class EvalSchedule:
    """Every so many steps, or as often as is cheap.

    Where workers wait for each other, a look of one costs all of them its time; so it is their sum that is kept small.
    """

    def __init__(self, every: int, workers: int) -> None:
        self._every, self._share = every, LOOKING / workers
        self._since, self._cost_s = 0.0, math.inf
        self._guesses = 0

    @property
    def guessing(self) -> bool:
        """Whether it is not clear yet what a look takes."""
        return not self._every and self._guesses < GUESSES

    def expect(self, now: float, cost_s: float) -> None:
        """A guess, before the first look, of what that takes. Of several the lowest counts: a first gradient takes long
        for many reasons."""
        self._guesses += 1
        self._since, self._cost_s = (now if self._guesses == 1 else self._since), min(cost_s, self._cost_s)

    def took(self, now: float, cost_s: float) -> None:
        """A look has taken so long."""
        self._since, self._cost_s, self._guesses = now, cost_s, GUESSES

    def due(self, now: float, step: int) -> bool:
        """Whether to look after this step."""
        if self._every:
            return step % self._every == 0
        return now >= self._since + self._cost_s / self._share
