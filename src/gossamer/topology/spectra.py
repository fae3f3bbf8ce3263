"""The constants of a graph that A²CiD² and gossip are tuned and judged by.

An edge fires at λ_ij = (r/2)(1/d_i + 1/d_j), at r exchanges per worker and gradient. With
Λ = Σ λ_ij (e_i − e_j)(e_i − e_j)ᵀ:

    χ1 = 1/λ_2(Λ) = the largest eigenvalue of Λ⁺
    χ2 = ½ max over edges of the effective resistance (e_i − e_j)ᵀ Λ⁺ (e_i − e_j)
    η = 1/(2√(χ1 χ2)),  α̃ = ½√(χ1/χ2)

Everything here is at r = 1; both χ are proportional to 1/r. The spectral gap is 1 − max(|λ_2|, |λ_n|) of the
Metropolis–Hastings matrix W_ij = 1/(1 + max(d_i, d_j)). Reference: Nabli, Belilovsky, Oyallon, NeurIPS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy import linalg

from gossamer.topology import resistance
from gossamer.topology.laplacian import Laplacian
from gossamer.topology.structures import CayleyGraph, EdgeGraph, Structure

DENSE_WORKERS = 400  # up to here all eigenvalues are computed
INVERSE_WORKERS = 2000  # up to here Λ⁺ is made (32 MB), and χ2 is exact


@dataclass(frozen=True)
class Constants:
    """What a graph is worth for gossip, at a given exchange rate; the module's text defines them."""

    chi1: float
    chi2: float
    eta: float
    alpha_tilde: float
    spectral_gap: float

    def at_rate(self, rate: float) -> Constants:
        """From rate 1 to ``rate`` exchanges per worker and gradient."""
        return replace(self, chi1=self.chi1 / rate, chi2=self.chi2 / rate, eta=self.eta * rate)


def constants(structure: Structure) -> Constants:
    """The constants at rate 1, in the way that suits the kind and the size of the graph."""
    if structure.workers == 1:
        # Nobody to disagree with: nothing to accelerate, and gossip is as good as it gets.
        return Constants(chi1=0.0, chi2=0.0, eta=0.0, alpha_tilde=0.5, spectral_gap=1.0)
    if isinstance(structure, CayleyGraph):
        return cayley_constants(structure)
    if structure.workers <= DENSE_WORKERS:
        return dense_constants(structure)
    return sparse_constants(structure)


def cayley_constants(graph: CayleyGraph) -> Constants:
    """Exactly, in O(n log n), by the Fourier transform of the offsets: where all look alike, waves are eigenvectors."""
    here = (0,) * len(graph.shape)
    to = tuple(graph.offsets.T)
    joined = np.zeros(graph.shape)
    joined[to] = 1.0
    laplacian = graph.degree - np.fft.fftn(joined).real  # its eigenvalues when each edge weighs 1
    laplacian[here] = np.inf
    inverse = np.fft.ifftn(graph.degree / laplacian).real  # the row of worker 0 in Λ⁺
    mixing = 1.0 - laplacian / (1 + graph.degree)
    mixing[here] = 0.0
    return _from_chi(
        chi1=float(graph.degree / laplacian.min()),
        chi2=float((inverse[here] - inverse[to]).max()),
        gap=float(1.0 - np.abs(mixing).max()),
    )


def dense_constants(graph: EdgeGraph) -> Constants:
    """Exactly, by all eigenvalues and the inverse as a full matrix, in O(n³)."""
    rates = Laplacian(graph, edge_rates(graph))
    values = linalg.eigvalsh(rates.matrix.toarray())
    mixing = np.eye(graph.workers) - Laplacian(graph, mixing_weights(graph)).matrix.toarray()
    others = linalg.eigvalsh(mixing)[:-1]
    return _from_chi(
        chi1=float(1.0 / values[1]),
        chi2=0.5 * resistance.largest_from_inverse(rates),
        gap=float(1.0 - np.abs(others).max()),
    )


def sparse_constants(graph: EdgeGraph, inverse_workers: int = INVERSE_WORKERS) -> Constants:
    """By Lanczos iteration; χ2 exactly up to ``inverse_workers`` and on trees, beyond as ``resistance`` says."""
    rates = Laplacian(graph, edge_rates(graph))
    largest = resistance.largest_from_inverse if graph.workers <= inverse_workers else resistance.largest_by_sketch
    return _from_chi(
        chi1=1.0 / rates.second_eigenvalue(),
        chi2=0.5 * largest(rates),
        gap=_sparse_gap(graph),
    )


def rate_spectrum(structure: Structure) -> np.ndarray:
    """All eigenvalues of Λ but the 0 of the mean, ascending; exact, in O(n³) unless all workers look alike."""
    if isinstance(structure, CayleyGraph):
        joined = np.zeros(structure.shape)
        joined[tuple(structure.offsets.T)] = 1.0
        values: np.ndarray = 1.0 - np.fft.fftn(joined).real.ravel() / max(1, structure.degree)
    else:
        values = linalg.eigvalsh(Laplacian(structure, edge_rates(structure)).matrix.toarray())
    ordered: np.ndarray = np.sort(values)[1:]
    return ordered


def edge_rates(graph: Structure, rate: float = 1.0) -> np.ndarray:
    """λ_ij for each edge, in the order of ``graph.edges``."""
    shares = 1.0 / np.maximum(graph.degrees, 1)
    return 0.5 * rate * shares[graph.edges].sum(axis=1)


def mixing_weights(graph: Structure) -> np.ndarray:
    """The Metropolis–Hastings weight of each edge."""
    return 1.0 / (1.0 + graph.degrees[graph.edges].max(axis=1))


def _from_chi(*, chi1: float, chi2: float, gap: float) -> Constants:
    chi1 = max(chi1, chi2)  # they are equal on complete graphs, where round-off may swap them
    return Constants(
        chi1=chi1,
        chi2=chi2,
        eta=float(0.5 / np.sqrt(chi1 * chi2)),
        alpha_tilde=float(0.5 * np.sqrt(chi1 / chi2)),
        spectral_gap=min(max(gap, 0.0), 1.0),
    )


def _sparse_gap(graph: EdgeGraph) -> float:
    weights = Laplacian(graph, mixing_weights(graph))
    below_one = weights.second_eigenvalue()  # 1 − λ_2(W)
    # Gershgorin: 1 + λ_n(W) ≥ 2 min W_ii, which is nearly always more than 1 − λ_2 and then need not be computed.
    if below_one <= 2.0 * (1.0 - weights.matrix.diagonal().max()):
        return below_one
    return min(below_one, 2.0 - weights.largest_eigenvalue())
