"""The compressors that can be asked for by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from gossamer.compress.compressor import Compressor, check_ratio
from gossamer.compress.int8 import Int8
from gossamer.compress.lowrank import LowRank
from gossamer.compress.none import Dense
from gossamer.compress.randomblock import RandomBlock
from gossamer.compress.sign import Sign
from gossamer.compress.topk import TopK
from gossamer.errors import unknown

COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    kind.name: kind for kind in (TopK, RandomBlock, Sign, Int8, LowRank, Dense)
}

_WITH_RATIO = (TopK, RandomBlock, LowRank)


def names() -> tuple[str, ...]:
    """All names that :func:`make` knows."""
    return tuple(COMPRESSORS)


def make(name: str, ratio: float) -> Compressor:
    """A compressor by name.

    ``ratio`` is dense size over message size. It sets ``topk`` (counted in elements: with the indices the
    message is twice as long), ``randomblock`` and ``lowrank``; the others have a ratio of their own.

    >>> make("topk", ratio=128).size_bytes(num_elements=1_280)
    80
    """
    if name not in COMPRESSORS:
        raise unknown("compressor", name, COMPRESSORS)
    check_ratio(ratio)
    kind = COMPRESSORS[name]
    return kind(ratio) if kind in _WITH_RATIO else kind()


def describe(name: str) -> str:
    """One line on what a compressor sends."""
    if name not in COMPRESSORS:
        raise unknown("compressor", name, COMPRESSORS)
    return (inspect.getdoc(COMPRESSORS[name]) or "").splitlines()[0]
