"""Independent random streams from one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import numpy as np

from gossamer.errors import InputError


def stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return the random generator for one purpose.

    Streams that differ in seed, purpose or counters are independent of each other.
    """
    if seed < 0:
        raise InputError(f"seed is {seed}: expected a whole number of 0 or more.")
    return np.random.default_rng([seed, int.from_bytes(purpose.encode()), *counters])


def in_blocks(draw: Callable[[int], list[float]]) -> Iterator[float]:
    """Yield the numbers of ``draw(count)`` one by one, but draw many at a time, which is several times faster.

    The numbers are the same as if drawn singly, as long as nothing else draws from the same stream.
    """
    return chain.from_iterable(map(draw, repeat(32)))


def exponentials(rng: np.random.Generator) -> Iterator[float]:
    """Yield exponentially distributed numbers of mean 1."""
    return in_blocks(lambda count: rng.standard_exponential(count).tolist())
