"""The interface of a compressor, error feedback, the compression ratio, and the compressor that compresses nothing."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from gossamer.effects import Effect, Mean
from gossamer.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from gossamer.worker import Worker

Averaging: TypeAlias = "Generator[Effect, Any, tuple[list[Part], Part]]"
"""Type of ``Compressor.average``: it yields ``Mean`` and ``Gather`` effects and returns ``(mean, kept)``."""


class Part(NamedTuple):
    """A vector, whole or by some of its elements: the others are zero, and need no memory."""

    values: Tensor
    indices: Tensor | None = None
    factor: float = 1.0
    """By which the values are to be multiplied."""


def add_parts(vector: Tensor, parts: Iterable[Part], factor: float = 1.0) -> None:
    """Add ``factor`` times the sum of the parts to ``vector``, in their order."""
    for values, indices, own_factor in parts:
        if indices is None:
            vector.add_(values, alpha=factor * own_factor)
        else:
            # The indices of one part are distinct, so the result is the same each time.
            vector.index_add_(0, indices, values, alpha=factor * own_factor)


class Compressor(Protocol):
    """Averages a flat vector over all workers, but sends only a part of it.

    A compressor keeps no state of its own: what it has to remember is in ``worker.vector(name)``.
    """

    @property
    def name(self) -> str:
        """Its name in the table."""

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        """Average what the compression keeps of ``vector`` over all workers.

        Return ``(mean, kept)``. ``mean`` is the sum of its parts, which are equal to the bit on all workers. ``kept``
        is what this worker contributed: ``mean`` is the mean of all workers' ``kept``, up to rounding, and error
        feedback remembers ``vector − kept``.

        ``vector`` is not written to, and must not change until the generator has returned. Numbers that are not finite
        make the mean non-finite on all workers.
        """

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        """Return the number of bytes in the messages of one worker per averaging."""


@dataclass(frozen=True)
class Dense:
    """No compression: an all-reduce of the whole vector. It has no ratio."""

    name: ClassVar[str] = "none"

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        mean = yield Mean(vector, round, topic)
        return [Part(mean.clone())], Part(vector.clone())

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return num_elements * itemsize


def average_with_feedback(
    compressor: Compressor, worker: Worker, residual: Tensor, round: int, topic: str
) -> Generator[Effect, Any, list[Part]]:
    """Average ``residual`` compressed; leave in it what was not sent. This is error feedback:

        c_i = compress(p_i) ;  a_i = p_i − c_i ;  returns the parts of mean_i c_i

    ``residual``, p_i, is the sum of what this worker has to send now and of what was not sent before. Nobody else may
    change it before the return.
    """
    mean, kept = yield from compressor.average(worker, residual, round, topic)
    add_parts(residual, [kept], -1.0)
    return mean


def check_ratio(ratio: float) -> None:
    """Raise ``InputError`` unless the compression ratio is a finite number of at least 1."""
    if not (math.isfinite(ratio) and ratio >= 1):
        raise InputError(f"compression ratio {ratio} cannot be used: expected a finite number of at least 1")


def num_kept(num_elements: int, ratio: float) -> int:
    """Return the number of elements that a sparse compressor keeps: ``ceil(n / ratio)``, at least one."""
    return max(1, math.ceil(num_elements / ratio))
