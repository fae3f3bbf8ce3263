"""Weighted graph Laplacians: linear systems, the pseudo-inverse, extreme eigenvalues. Imports scipy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph
from scipy.sparse.linalg import LinearOperator, eigsh, splu

from gossamer.topology.structures import EdgeGraph

MAX_TREE_LIKE_DENSITY = 1.1
"""Edges per worker up to which a sparse factorization, well ordered, has little fill-in."""
MAX_FACTOR_SIZE = 5_000_000
"""Entries of a banded factorization that we are willing to store."""
SOLVE_TOLERANCE = 1e-9
EIGENVALUE_TOLERANCE = 1e-7
NUM_LANCZOS_VECTORS = 40


class Laplacian:
    """L = Σ w_ij (e_i − e_j)(e_i − e_j)ᵀ of a connected graph."""

    def __init__(self, graph: EdgeGraph, weights: np.ndarray) -> None:
        self.graph = graph
        self.weights = weights
        off_diagonal = graph.matrix(weights)
        self.matrix = (sparse.diags(np.asarray(off_diagonal.sum(axis=1)).ravel()) - off_diagonal).tocsr()

    def solve(self, right: np.ndarray) -> np.ndarray:
        """Return L⁺ right, for a vector or for each column of a matrix."""
        columns = right.reshape(len(right), -1)
        solution = self._solver(columns - columns.mean(axis=0))
        return (solution - solution.mean(axis=0)).reshape(right.shape)

    def pseudo_inverse(self) -> np.ndarray:
        n = self.graph.workers
        inverse: np.ndarray = np.linalg.inv(self.matrix.toarray() + 1.0 / n) - 1.0 / n
        return inverse

    def second_eigenvalue(self) -> float:
        """Return λ_2 by Lanczos iteration on L⁺, whose largest eigenvalue 1/λ_2 is well separated."""
        return 1.0 / self._extreme_eigenvalue(self.solve)

    def largest_eigenvalue(self) -> float:
        """Return λ_n by Lanczos iteration."""
        return self._extreme_eigenvalue(self.matrix.dot)

    def _extreme_eigenvalue(self, apply: Callable[[np.ndarray], np.ndarray]) -> float:
        n = self.graph.workers
        start = np.random.default_rng(0).standard_normal(n)
        (value,) = eigsh(
            LinearOperator((n, n), matvec=apply, dtype=float),
            k=1,
            which="LA",
            v0=start - start.mean(),
            tol=EIGENVALUE_TOLERANCE,
            return_eigenvectors=False,
            ncv=min(NUM_LANCZOS_VECTORS, n - 1),
        )
        return float(value)

    @cached_property
    def _solver(self) -> Callable[[np.ndarray], np.ndarray]:
        """Solve by a factorization where that stays small, else by conjugate gradients.

        Random graphs fill a factorization in completely. Trees and long thin graphs do not, and conjugate gradients
        converge slowly on them.
        """
        n = self.graph.workers
        grounded = self.matrix[1:, 1:].tocsc()  # L is singular; without the row and column of worker 0 it is not
        if self.graph.num_edges <= MAX_TREE_LIKE_DENSITY * n:
            factors = splu(grounded, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
            return lambda right: _with_ground(factors.solve(right[1:]))
        order = csgraph.reverse_cuthill_mckee(grounded.tocsr(), symmetric_mode=True)
        banded = grounded[order][:, order].tocoo()
        bandwidth = int(np.abs(banded.row - banded.col).max())
        if n * bandwidth <= MAX_FACTOR_SIZE:
            in_order = splu(
                banded.tocsc(), permc_spec="NATURAL", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
            )
            back = np.argsort(order)
            return lambda right: _with_ground(in_order.solve(right[1:][order])[back])
        return self._conjugate_gradients

    def _conjugate_gradients(self, right: np.ndarray) -> np.ndarray:
        """Solve all columns at once (scipy takes one at a time), preconditioned by the diagonal."""
        scaling = 1.0 / self.matrix.diagonal()[:, None]
        solution = np.zeros_like(right)
        residual = right.copy()
        direction = scaling * residual
        energy = np.einsum("ij,ij->j", residual, direction)
        target = SOLVE_TOLERANCE**2 * energy
        for _ in range(20 * len(right)):
            if np.all(energy <= target):
                break
            image = self.matrix @ direction
            curvature = np.einsum("ij,ij->j", direction, image)
            step = np.divide(energy, curvature, out=np.zeros_like(energy), where=curvature > 0)
            solution += step * direction
            residual -= step * image
            scaled = scaling * residual
            before, energy = energy, np.einsum("ij,ij->j", residual, scaled)
            direction *= np.divide(energy, before, out=np.zeros_like(energy), where=before > 0)
            direction += scaled
        return solution


def _with_ground(rest: np.ndarray) -> np.ndarray:
    return np.vstack([np.zeros((1, rest.shape[1])), rest])
