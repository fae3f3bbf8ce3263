"""Independent random streams from one seed."""

from __future__ import annotations

import numpy as np

from gossamer.errors import InputError


def stream(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """The generator for one purpose; streams of other purposes, counters or seeds are independent of it."""
    if seed < 0:
        raise InputError(f"seed is {seed}: expected a whole number of 0 or more.")
    return np.random.default_rng([seed, int.from_bytes(purpose.encode()), *counters])
