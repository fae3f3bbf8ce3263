"""Low rank (PowerSGD): the vector as a matrix, approximated by a product of two thin ones.

The flat vector, padded with zeros, is read as a nearly square matrix ``M_i`` of ``rows × cols``. One power
iteration per round, started from the ``Q`` of the round before::

    P = mean_i(M_i Q) ;  orthogonalise P ;  Q_i = M_iᵀ P ;  Q = mean_i(Q_i)
    mean = P Qᵀ ;  kept_i = P Q_iᵀ

``P`` and ``Q_i`` travel, ``r (rows + cols)`` numbers, both averaged directly. ``kept_i`` is the projection of
``M_i`` onto the columns of ``P``. UnsupportedModule the paper we see one flat vector and not the layers: its rows have
nothing to do with the rows of a weight, and the rank is that of the whole model's matrix.

State: ``lowrank.q``, the last ``Q``, alike on all workers. All zeros mean that there is none yet: it is then
drawn from the seed. ``mean`` is bit-identical on workers of the same kind of hardware and library only, for
every worker orthogonalises and multiplies for itself.

Reference: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from gossamer.compress.compressor import Averaging, check_ratio
from gossamer.effects import Mean
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.worker import Worker


@dataclass(frozen=True)
class LowRank:
    """A low-rank approximation of the vector read as a square matrix (PowerSGD)."""

    ratio: float
    rank: int = 0  # 0: as high as the ratio leaves room for, at least 1
    name: ClassVar[str] = "lowrank"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.rank < 0:
            raise InputError(f"rank {self.rank} is negative: expected at least 1, or 0 to derive it from the ratio")

    def shape(self, num_elements: int) -> tuple[int, int, int]:
        """Rows and columns of the matrix, and the rank of its approximation."""
        cols = math.isqrt(num_elements - 1) + 1
        rows = -(-num_elements // cols)
        rank = self.rank or int(num_elements / (self.ratio * (rows + cols)))
        return rows, cols, min(max(1, rank), rows, cols)

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        rows, cols, rank = self.shape(vector.numel())
        matrix = vector.new_zeros(rows, cols)
        matrix.view(-1)[: vector.numel()] = vector
        last_q = worker.vector("lowrank.q", cols * rank)

        start = _usable(last_q, worker.seed).to(vector.dtype).view(cols, rank)
        p_answer = yield Mean((matrix @ start).view(-1), round, f"{topic}.p")
        p = _orthonormal(p_answer.view(rows, rank))
        own_q = matrix.T @ p
        q_answer = yield Mean(own_q.view(-1), round, f"{topic}.q")
        last_q.copy_(q_answer)

        mean = p @ q_answer.view(cols, rank).T
        kept = torch.mm(p, own_q.T, out=matrix)
        return mean.view(-1)[: vector.numel()], kept.view(-1)[: vector.numel()]

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        rows, cols, rank = self.shape(num_elements)
        return rank * (rows + cols) * itemsize


def _usable(last_q: Tensor, seed: int) -> Tensor:
    """The last Q; where there is none, or it was spoilt by numbers that are not finite, a random one."""
    size = float(torch.linalg.vector_norm(last_q))
    if size > 0 and math.isfinite(size):
        return last_q
    drawn = np.random.default_rng(seed & (2**64 - 1)).standard_normal(last_q.numel())
    return torch.from_numpy(drawn).to(last_q)


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns; in float64, since nearly parallel columns are the rule here."""
    return torch.linalg.qr(columns.double()).Q.to(columns.dtype)
