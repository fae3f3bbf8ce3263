"""Independent random streams from one seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import TYPE_CHECKING

from gossamer.errors import InputError

if TYPE_CHECKING:
    import numpy as np


def stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return the random generator for one purpose.

    Streams that differ in seed, purpose or counters are independent of each other.
    """
    import numpy as np  # Where there are histories of the protocol only, numpy may be missing.

    if seed < 0:
        raise InputError(f"seed is {seed}: expected a whole number of 0 or more.")
    return np.random.default_rng([seed, int.from_bytes(purpose.encode()), *counters])


def text_stream(text: str) -> random.Random:
    """Return ``random.Random(text)``, seeded with the hash of a library: that of ``random`` is slow in PyPy."""
    data = text.encode()
    return random.Random(int.from_bytes(data + hashlib.sha512(data).digest()))


def in_blocks(draw: Callable[[int], list[float]]) -> Iterator[float]:
    """Yield the numbers of ``draw(count)`` one by one, but draw many at a time, which is several times faster.

    The numbers are the same as if drawn singly, as long as nothing else draws from the same stream.
    """
    return chain.from_iterable(map(draw, repeat(32)))


def exponentials(rng: np.random.Generator) -> Iterator[float]:
    """Yield exponentially distributed numbers of mean 1."""
    return in_blocks(lambda count: rng.standard_exponential(count).tolist())
