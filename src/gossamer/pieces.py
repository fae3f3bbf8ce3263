"""Arithmetic on long vectors: cut into pieces, so that what is computed of them in between stays in a core's cache; and
sums in one call, which is what counts where vectors only pass for tensors and their arithmetic is written down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 17
"""Elements of a piece."""


def pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of one length as views of some of their elements, all of them in the end; whole where they are short, not
    in the memory of the CPU, or only pass for tensors.

    For arithmetic element by element: ``for x, y in pieces(xs, ys): x.sub_(y.square().add_(1))`` allocates next to
    nothing.
    """
    length = len(vectors[0])
    if length <= PIECE or any(not isinstance(v, Tensor) or v.device.type != "cpu" for v in vectors):
        yield vectors
        return
    assert all(len(vector) == length for vector in vectors)
    for start in range(0, length, PIECE):
        yield tuple(vector[start : start + PIECE] for vector in vectors)


def accumulate(total: Any, *terms: tuple[float, Any]) -> None:
    """``total += Σ number · vector``."""
    if isinstance(total, Tensor):
        for number, vector in terms:
            total.add_(vector, alpha=number)
    else:
        total.accumulate(*terms)


def combine(start: Any, *terms: tuple[float, Any], out: Any) -> None:
    """``out = start + Σ number · vector``, none of which is ``out``."""
    if not isinstance(out, Tensor):
        out.combine(start, *terms)
        return
    (number, vector), *others = terms
    torch.add(start, vector, alpha=number, out=out)
    accumulate(out, *others)


def distance(one: Tensor, other: Tensor) -> float:
    """‖one − other‖, without a third vector as long."""
    return sum(float(torch.linalg.vector_norm(a - b)) ** 2 for a, b in pieces(one, other)) ** 0.5
