"""Arithmetic on long vectors.

``chunks`` cuts vectors into pieces whose intermediate results stay in a core's cache. ``combine`` computes several sums
in one call, which the virtual world records as one operation (``gossamer.virtual.compute.tape``). Importing this module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 1 << 17
"""Elements of a chunk."""

ROUNDING = 1e-6
"""How far the mean of equal vectors may be from them, relative to their norm."""

Sum = tuple[Any, float, Sequence[tuple[float, Any]]]
"""``(vector, keep, terms)``: ``vector = keep · vector + Σ factor · term``, with ``(factor, term)`` in ``terms``."""


def chunks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield vectors of one length as views of ``CHUNK`` elements each, for arithmetic element by element.

    ``for x, y in chunks(xs, ys): x.sub_(y.square().add_(1))`` allocates almost nothing. Vectors that are short, on a
    GPU, or rows of the virtual world are yielded whole.
    """
    length = len(vectors[0])
    if length <= CHUNK or any(_is_row(v) or v.device.type != "cpu" for v in vectors):
        yield vectors
        return
    assert all(len(vector) == length for vector in vectors)
    for start in range(0, length, CHUNK):
        yield tuple(vector[start : start + CHUNK] for vector in vectors)


def combine(*sums: Sum) -> None:
    """Compute each ``vector = keep · vector + Σ factor · term``, one after the other, in one pass over memory.

    A sum has at least one term, and no term is the vector itself. Where ``keep`` is 0, the old content is not read.
    """
    first = sums[0][0]
    if _is_row(first):
        first.combine(sums)
        return
    vectors = [operand for vector, _, terms in sums for operand in (vector, *(term for _, term in terms))]
    for views in chunks(*vectors):
        view = iter(views)
        for _, keep, terms in sums:
            _combine(next(view), keep, [(factor, next(view)) for factor, _ in terms])


def _combine(vector: Tensor, keep: float, terms: Sequence[tuple[float, Tensor]]) -> None:
    import torch

    if keep == 0.0:
        (factor, term), *terms = terms
        if factor == 1.0 and terms:
            (factor, other), *terms = terms
            torch.add(term, other, alpha=factor, out=vector)
        else:
            torch.mul(term, factor, out=vector)
    elif keep != 1.0:
        vector.mul_(keep)
    for factor, term in terms:
        vector.add_(term, alpha=factor)


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are equal. NaN equals nothing."""
    import torch

    if one.device.type != "cpu" or one.dtype == torch.bfloat16:
        return torch.equal(one, other)
    # In less than half of torch's time.
    return bool((one.numpy() == other.numpy()).all())


def distance(one: Tensor, other: Tensor) -> float:
    """Return ‖one − other‖ without a temporary of their length."""
    import torch

    return sum(float(torch.linalg.vector_norm(a - b)) ** 2 for a, b in chunks(one, other)) ** 0.5


def rounded_distance(one: Tensor, other: Tensor) -> float:
    """Return the distance of two vectors; 0 if they are equal up to the rounding of a mean."""
    import torch

    d = distance(one, other)
    return d if d > ROUNDING * float(torch.linalg.vector_norm(other)) else 0.0


def _is_row(vector: Any) -> bool:
    """Whether ``vector`` is a row of the virtual world, which records its sums (``gossamer.virtual.compute.rows``)."""
    return hasattr(vector, "combine")
