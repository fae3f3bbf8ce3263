"""Independent random streams from one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import numpy as np

from gossamer.errors import InputError


def stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """The generator for one purpose; streams of other purposes, counters or seeds are independent of it."""
    if seed < 0:
        raise InputError(f"seed is {seed}: expected a whole number of 0 or more.")
    return np.random.default_rng([seed, int.from_bytes(purpose.encode()), *counters])


def in_blocks(draw: Callable[[int], list[float]]) -> Iterator[float]:
    """What ``draw(count)`` gives, one by one, drawn many at a time: drawn singly they take several times as long.

    A random stream gives the same numbers either way, as long as nothing else is drawn from it.
    """
    return chain.from_iterable(map(draw, repeat(32)))


def exponentials(rng: np.random.Generator) -> Iterator[float]:
    """Exponential numbers of mean 1."""
    return in_blocks(lambda count: rng.standard_exponential(count).tolist())
