"""The constants of graphs stored as edges: dense, or by Lanczos iteration for many workers. Imports scipy."""

from __future__ import annotations

import numpy as np
from scipy import linalg

from gossamer.topology import resistance
from gossamer.topology.laplacian import Laplacian
from gossamer.topology.spectra import Constants, edge_rates, mixing_weights
from gossamer.topology.structures import EdgeGraph

MAX_DENSE_WORKERS = 400
"""Up to here, all eigenvalues are computed."""
MAX_INVERSE_WORKERS = 2000
"""Up to here, Λ⁺ is computed (32 MB) and χ2 is exact."""


def constants(graph: EdgeGraph) -> Constants:
    """Return the constants at rate 1."""
    return dense_constants(graph) if graph.workers <= MAX_DENSE_WORKERS else sparse_constants(graph)


def dense_constants(graph: EdgeGraph) -> Constants:
    """Return exact constants in O(n³), from all eigenvalues and the dense inverse."""
    rates = Laplacian(graph, edge_rates(graph))
    values = linalg.eigvalsh(rates.matrix.toarray())
    mixing = np.eye(graph.workers) - Laplacian(graph, mixing_weights(graph)).matrix.toarray()
    others = linalg.eigvalsh(mixing)[:-1]
    return Constants.from_chi(
        chi1=float(1.0 / values[1]),
        chi2=0.5 * resistance.largest_from_inverse(rates),
        spectral_gap=float(1.0 - np.abs(others).max()),
    )


def sparse_constants(graph: EdgeGraph, inverse_workers: int = MAX_INVERSE_WORKERS) -> Constants:
    """Return the constants by Lanczos iteration.

    χ2 is exact on trees and up to ``inverse_workers``; beyond, it is what ``resistance.largest_by_sketch`` finds.
    """
    rates = Laplacian(graph, edge_rates(graph))
    largest = resistance.largest_from_inverse if graph.workers <= inverse_workers else resistance.largest_by_sketch
    return Constants.from_chi(
        chi1=1.0 / rates.second_eigenvalue(),
        chi2=0.5 * largest(rates),
        spectral_gap=_sparse_gap(graph),
    )


def rate_eigenvalues(graph: EdgeGraph) -> np.ndarray:
    """Return all eigenvalues of Λ at rate 1, in O(n³)."""
    values: np.ndarray = linalg.eigvalsh(Laplacian(graph, edge_rates(graph)).matrix.toarray())
    return values


def _sparse_gap(graph: EdgeGraph) -> float:
    weights = Laplacian(graph, mixing_weights(graph))
    below_one = weights.second_eigenvalue()  # 1 − λ_2(W)
    # Gershgorin: 1 + λ_n(W) ≥ 2 min W_ii. That is nearly always more than 1 − λ_2(W), and then λ_n does not matter.
    if below_one <= 2.0 * (1.0 - weights.matrix.diagonal().max()):
        return below_one
    return min(below_one, 2.0 - weights.largest_eigenvalue())
