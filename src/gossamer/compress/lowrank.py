"""Low rank (PowerSGD): the vector as a matrix, approximated by a product of two thin matrices.

The flat vector, padded with zeros, is read as a nearly square matrix ``M_i`` of ``rows × cols``. One power
iteration per round, starting from the ``Q`` of the previous round:

    P = mean_i(M_i Q) ;  orthogonalise P ;  Q_i = M_iᵀ P ;  Q = mean_i(Q_i)
    mean = P Qᵀ ;  kept_i = P Q_iᵀ

Each worker sends ``M_i Q`` and ``Q_i``, ``r (rows + cols)`` numbers, which all-reduces average. ``kept_i`` is the
projection of ``M_i`` onto the columns of ``P``. Unlike the paper, this sees one flat vector instead of layers: the rows
of the matrix are unrelated to the rows of a weight, and the rank is that of one matrix for the whole model.

State: ``lowrank.q``, the last ``Q``, equal on all workers. All zeros mean that there is none yet: then it is drawn from
the seed. ``mean`` is equal to the bit only on workers with the same hardware and libraries, because every worker
orthogonalises and multiplies by itself.

Reference: Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from gossamer.compress.compressor import Averaging, Part, check_ratio
from gossamer.effects import Mean
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.worker import Worker


@dataclass(frozen=True)
class LowRank:
    """A low-rank approximation of the vector, read as a nearly square matrix (PowerSGD)."""

    ratio: float
    rank: int = 0
    """0: as high as the ratio allows, at least 1."""
    name: ClassVar[str] = "lowrank"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.rank < 0:
            raise InputError(f"rank {self.rank} is negative: expected at least 1, or 0 to derive it from the ratio")

    def shape(self, num_elements: int) -> tuple[int, int, int]:
        """Return rows and columns of the matrix, and the rank of its approximation."""
        cols = math.isqrt(num_elements - 1) + 1
        rows = -(-num_elements // cols)
        rank = self.rank or int(num_elements / (self.ratio * (rows + cols)))
        return rows, cols, min(max(1, rank), rows, cols)

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        rows, cols, rank = self.shape(vector.numel())
        matrix = vector.new_zeros(rows, cols)
        matrix.view(-1)[: vector.numel()] = vector
        last_q = worker.vector("lowrank.q", cols * rank)

        start = _first_q(last_q, worker.seed).to(vector.dtype).view(cols, rank)
        p_answer = yield Mean((matrix @ start).view(-1), round, f"{topic}.p")
        p = _orthonormal(p_answer.view(rows, rank))
        local_q = matrix.T @ p
        q_answer = yield Mean(local_q.view(-1), round, f"{topic}.q")
        last_q.copy_(q_answer)

        mean = p @ q_answer.view(cols, rank).T
        kept = torch.mm(p, local_q.T, out=matrix)
        return [Part(mean.view(-1)[: vector.numel()])], Part(kept.view(-1)[: vector.numel()])

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        rows, cols, rank = self.shape(num_elements)
        return rank * (rows + cols) * itemsize


def _first_q(last_q: Tensor, seed: int) -> Tensor:
    """Return the last Q, or a random one if there is none yet or it is not finite."""
    size = float(torch.linalg.vector_norm(last_q))
    if size > 0 and math.isfinite(size):
        return last_q
    drawn = np.random.default_rng(seed & (2**64 - 1)).standard_normal(last_q.numel())
    return torch.from_numpy(drawn).to(last_q)


def _orthonormal(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns; in float64, because the columns are often nearly parallel."""
    return torch.linalg.qr(columns.double()).Q.to(columns.dtype)
