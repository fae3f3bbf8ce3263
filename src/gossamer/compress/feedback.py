"""Error feedback: what a compressor leaves out is remembered and offered again."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.compress.compressor import Compressor
from gossamer.effects import Effect

if TYPE_CHECKING:
    from gossamer.worker import Worker


def average_with_feedback(
    compressor: Compressor, worker: Worker, vector: Tensor, residual: Tensor, round: int, topic: str
) -> Generator[Effect, Any, Tensor]:
    """The compressed mean of ``vector + residual``; the part left out stays in ``residual``, in place.

    ::

        p_i = g_i + a_i ;  c_i = compress(p_i) ;  a_i = p_i − c_i ;  returns mean_i c_i

    ``vector`` may change as soon as the first effect was yielded, ``residual`` not before the return.
    """
    residual.add_(vector)
    mean, kept = yield from compressor.average(worker, residual, round, topic)
    residual.sub_(kept)
    return mean
