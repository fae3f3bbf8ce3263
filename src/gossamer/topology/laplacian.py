"""Weighted graph Laplacians and systems of equations with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph
from scipy.sparse.linalg import LinearOperator, eigsh, splu

from gossamer.topology.structures import EdgeGraph

NEARLY_A_TREE = 1.1  # edges per worker up to which a sparse factorization hardly fills in, in the right order
LARGEST_FACTOR = 5_000_000  # numbers in a banded factorization that we are ready to store
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
        """L⁺ right, for a vector or for the columns of a matrix."""
        columns = right.reshape(len(right), -1)
        solution = self._solver(columns - columns.mean(axis=0))
        return (solution - solution.mean(axis=0)).reshape(right.shape)

    def pseudo_inverse(self) -> np.ndarray:
        """L⁺ as a full matrix."""
        n = self.graph.workers
        inverse: np.ndarray = np.linalg.inv(self.matrix.toarray() + 1.0 / n) - 1.0 / n
        return inverse

    def second_eigenvalue(self) -> float:
        """λ_2, by Lanczos iteration on L⁺: there it is the far end of the spectrum, well apart from the rest."""
        return 1.0 / self._extreme_eigenvalue(self.solve)

    def largest_eigenvalue(self) -> float:
        """λ_n, by Lanczos iteration."""
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
        """A factorization where it stays small, else conjugate gradients, which store nothing.

        A factorization of a graph with random edges fills in to a full matrix; trees and long thin graphs, on which
        conjugate gradients are slow, do not.
        """
        n = self.graph.workers
        grounded = self.matrix[1:, 1:].tocsc()  # L is singular; with one worker held at 0 it is not
        if self.graph.num_edges <= NEARLY_A_TREE * n:
            factors = splu(grounded, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
            return lambda right: _with_ground(factors.solve(right[1:]))
        order = csgraph.reverse_cuthill_mckee(grounded.tocsr(), symmetric_mode=True)
        banded = grounded[order][:, order].tocoo()
        bandwidth = int(np.abs(banded.row - banded.col).max())
        if n * bandwidth <= LARGEST_FACTOR:
            in_order = splu(
                banded.tocsc(), permc_spec="NATURAL", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
            )
            back = np.argsort(order)
            return lambda right: _with_ground(in_order.solve(right[1:][order])[back])
        return self._conjugate_gradients

    def _conjugate_gradients(self, right: np.ndarray) -> np.ndarray:
        """Preconditioned by the diagonal, all columns side by side; scipy's takes one column at a time."""
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
