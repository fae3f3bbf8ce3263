"""Arithmetic on long vectors: cut into chunks, so that what is computed of them in between stays in a core's cache; and
sums in one call, which is what counts where vectors only pass for tensors and their arithmetic is written down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 17
"""Elements of a piece."""

Sum = tuple[Any, float, Sequence[tuple[float, Any]]]
"""``(vector, keep, terms)``: ``vector = keep · vector + Σ number · term``, with ``(number, term)`` in ``terms``."""


def chunks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of one length as views of some of their elements, all of them in the end; whole where they are short, not
    in the memory of the CPU, or only pass for tensors.

    For arithmetic element by element: ``for x, y in chunks(xs, ys): x.sub_(y.square().add_(1))`` allocates next to
    nothing.
    """
    length = len(vectors[0])
    if length <= CHUNK or any(not isinstance(v, Tensor) or v.device.type != "cpu" for v in vectors):
        yield vectors
        return
    assert all(len(vector) == length for vector in vectors)
    for start in range(0, length, CHUNK):
        yield tuple(vector[start : start + CHUNK] for vector in vectors)


def combine(*sums: Sum) -> None:
    """Each ``vector = keep · vector + Σ number · term``, one after the other, in one pass over memory.

    There is at least one term, and none is the vector itself. Where ``keep`` is 0, what was there before is not read.
    """
    first = sums[0][0]
    if not isinstance(first, Tensor):
        first.combine(sums)
        return
    vectors = [each for vector, _, terms in sums for each in (vector, *(term for _, term in terms))]
    for views in chunks(*vectors):
        view = iter(views)
        for _, keep, terms in sums:
            _combine(next(view), keep, [(number, next(view)) for number, _ in terms])


def _combine(vector: Tensor, keep: float, terms: Sequence[tuple[float, Tensor]]) -> None:
    if keep == 0.0:
        (number, term), *terms = terms
        if number == 1.0 and terms:
            (number, other), *terms = terms
            torch.add(term, other, alpha=number, out=vector)
        else:
            torch.mul(term, number, out=vector)
    elif keep != 1.0:
        vector.mul_(keep)
    for number, term in terms:
        vector.add_(term, alpha=number)


def distance(one: Tensor, other: Tensor) -> float:
    """‖one − other‖, without a third vector as long."""
    return sum(float(torch.linalg.vector_norm(a - b)) ** 2 for a, b in chunks(one, other)) ** 0.5
