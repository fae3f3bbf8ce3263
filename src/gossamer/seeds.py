"""Independent random streams from one seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gossamer.errors import InputError


def stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """The generator for one purpose; streams of other purposes, counters or seeds are independent of it."""
    if seed < 0:
        raise InputError(f"seed is {seed}: expected a whole number of 0 or more.")
    return np.random.default_rng([seed, int.from_bytes(purpose.encode()), *counters])


class Ahead:
    """Numbers from many streams, of each drawn in blocks: one by one they take several times as long.

    A stream gives the same numbers either way, as long as nothing else is drawn from it.
    """

    BLOCK = 32

    def __init__(self, draw: Callable[[int, np.random.Generator, int], list[float]]) -> None:
        self.draw = draw
        """``draw(rank, stream, count)``: the next numbers of this worker's stream."""
        self._left: dict[int, list[float]] = {}

    def next(self, rank: int, rng: np.random.Generator) -> float:
        """The next number of this worker's stream."""
        left = self._left.get(rank)
        if not left:
            left = self._left[rank] = self.draw(rank, rng, self.BLOCK)[::-1]
        return left.pop()


def exponentials(rank: int, rng: np.random.Generator, count: int) -> list[float]:
    """Exponential numbers of mean 1, for ``Ahead``."""
    numbers: list[float] = rng.standard_exponential(count).tolist()
    return numbers
