"""How fast a schedule of rounds brings workers together.

A round is a symmetric, doubly stochastic matrix W: it moves each worker towards its group's mean by the group's
strength. A period is the product M = W_K … W_1. ``MixingRound`` applies W group by group, without a matrix, so one
group of 10,000 workers costs no more than 5,000 pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gossamer.topology.schedules import Group, Rounds
from gossamer.topology.structures import EdgeGraph

if TYPE_CHECKING:
    from gossamer.topology.laplacian import Laplacian

DENSE_WORKERS = 600
"""Up to here, M is computed as a dense matrix."""
CONSENSUS_TOLERANCE = 1e-9
NUM_PERIODS_TRIED = 2
LANCZOS_TOLERANCE = 1e-7
MAX_LANCZOS_STEPS = 100
MIN_LANCZOS_STEPS = 20
MAX_MIXED_ROUNDS = 100_000
"""In all Lanczos steps together: it keeps a star of thousands of workers within seconds."""
MAX_SPARSE_PERIOD = 32
MAX_SPARSE_ROW = 64
"""Entries per row up to which M counts as sparse."""


class MixingRound:
    def __init__(self, groups: tuple[Group, ...]) -> None:
        sizes = [len(group.members) for group in groups]
        self._members = np.array([rank for group in groups for rank in group.members], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._sizes = np.array(sizes)
        self._strengths = np.repeat([group.strength for group in groups], sizes)

    def mix(self, values: np.ndarray) -> None:
        """Mix the rows of ``values`` [workers, columns] in place."""
        if len(self._members) == 0:
            return
        rows = values[self._members]
        means = np.add.reduceat(rows, self._starts, axis=0) / self._sizes[:, None]
        values[self._members] = rows + self._strengths[:, None] * (np.repeat(means, self._sizes, axis=0) - rows)


def contraction(workers: int, rounds: Rounds) -> float:
    """Return the largest singular value σ of M − J, J the mean of all: the share of a difference a period can leave.

    Beyond ``DENSE_WORKERS`` workers, Lanczos iteration computes it. That converges fast where σ is well below 1. Where
    it is not, as on a long ring, I − MᵀM is usually a sparse Laplacian with λ_2 = 1 − σ². Where it is not sparse (a
    star of thousands), the result is the Lanczos value, a lower bound.
    """
    if workers == 1:
        return 0.0
    steps = [MixingRound(groups) for groups in rounds]
    if workers <= DENSE_WORKERS:
        period = np.eye(workers)
        for step in steps:
            step.mix(period)
        return float(np.linalg.norm(period - 1 / workers, ord=2))
    value, converged = _largest_singular_value(workers, steps)
    decrease = None if converged else _energy_decrease(workers, rounds)
    if decrease is None:
        return value
    return float(np.sqrt(max(1.0 - decrease.second_eigenvalue(), 0.0)))


def rounds_to_consensus(workers: int, rounds: Rounds) -> int | None:
    """Return the smallest k with ‖W_k … W_1 − J‖ < 1e-9 (Frobenius), or None if there is none within two periods.

    Beyond ``DENSE_WORKERS`` workers, the product is applied to a few random vectors only.
    """
    if workers == 1:
        return 0
    values = np.eye(workers) if workers <= DENSE_WORKERS else _random_values(workers, columns=4)
    target = values.mean(axis=0)
    scale = 1.0 if workers <= DENSE_WORKERS else float(np.linalg.norm(values - target))
    steps = [MixingRound(groups) for groups in rounds]
    for count in range(NUM_PERIODS_TRIED * len(steps)):
        steps[count % len(steps)].mix(values)
        if np.linalg.norm(values - target) < CONSENSUS_TOLERANCE * scale:
            return count + 1
    return None


def _largest_singular_value(workers: int, steps: list[MixingRound]) -> tuple[float, bool]:
    """Return σ, and whether it has converged, by Lanczos iteration on MᵀM with full reorthogonalization."""
    vector = _random_values(workers, columns=1)
    vector -= vector.mean()
    basis = [vector / np.linalg.norm(vector)]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    num_steps = int(np.clip(MAX_MIXED_ROUNDS // len(steps), MIN_LANCZOS_STEPS, MAX_LANCZOS_STEPS))
    while True:
        image = basis[-1].copy()
        for step in [*steps, *reversed(steps)]:
            step.mix(image)
        image -= image.mean()
        diagonal.append(float(basis[-1][:, 0] @ image[:, 0]))
        known = np.hstack(basis)
        for _ in range(2):
            image -= known @ (known.T @ image)
        remainder = float(np.linalg.norm(image))
        values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1))
        largest = float(np.sqrt(max(values[-1], 0.0)))
        error = remainder * abs(vectors[-1, -1])
        if error <= LANCZOS_TOLERANCE * max(values[-1], LANCZOS_TOLERANCE):
            return largest, True
        if len(diagonal) == num_steps:
            return largest, False
        off_diagonal.append(remainder)
        basis.append(image / remainder)


def _energy_decrease(workers: int, rounds: Rounds) -> Laplacian | None:
    """Return I − MᵀM, the quadratic form of the energy that a period removes; None if it is not sparse."""
    from scipy import sparse

    from gossamer.topology.laplacian import Laplacian

    if len(rounds) > MAX_SPARSE_PERIOD:
        return None
    period = sparse.identity(workers, format="csr")
    for groups in filter(None, rounds):
        sizes = np.array([len(group.members) for group in groups])
        if (sizes**2).sum() > MAX_SPARSE_ROW * workers:
            return None
        strengths = np.array([group.strength for group in groups])
        members = [rank for group in groups for rank in group.members]
        membership = sparse.csr_matrix(
            (np.ones(len(members)), (np.repeat(np.arange(len(groups)), sizes), members)), shape=(len(groups), workers)
        )
        unmoved = 1.0 - membership.T @ strengths
        mixing = sparse.diags(unmoved) + membership.T @ sparse.diags(strengths / sizes) @ membership
        period = (mixing @ period).tocsr()
        if period.nnz > MAX_SPARSE_ROW * workers:
            return None
    upper = sparse.triu(period.T @ period, k=1, format="coo")
    order = np.lexsort((upper.col, upper.row))
    edges = np.stack([upper.row, upper.col], axis=-1)[order]
    return Laplacian(EdgeGraph(workers, edges), upper.data[order])


def _random_values(workers: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((workers, columns))
