"""The constants of a graph that tune A²CiD² and say how well gossip mixes.

An edge fires at rate λ_ij = (r/2)(1/d_i + 1/d_j), with r exchanges per worker and gradient. With
Λ = Σ λ_ij (e_i − e_j)(e_i − e_j)ᵀ:

    χ1 = 1/λ_2(Λ) = the largest eigenvalue of Λ⁺
    χ2 = ½ max over edges of the effective resistance (e_i − e_j)ᵀ Λ⁺ (e_i − e_j)
    η = 1/(2√(χ1 χ2)),  α̃ = ½√(χ1/χ2)

Everything is computed at r = 1; χ1 and χ2 are proportional to 1/r. The spectral gap is 1 − max(|λ_2|, |λ_n|) of the
Metropolis–Hastings matrix W_ij = 1/(1 + max(d_i, d_j)). Reference: Nabli, Belilovsky, Oyallon, NeurIPS 2023.

Cayley graphs (ring, torus, complete, …) have closed forms, here; ``edge_graph_spectra`` has all other graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gossamer.topology.structures import CayleyGraph, Structure


@dataclass(frozen=True)
class Constants:
    """The constants of a graph at one exchange rate; the module's docstring defines them."""

    chi1: float
    """χ1 = 1/λ_2(Λ): how slowly gossip mixes."""
    chi2: float
    """χ2: half the largest effective resistance of an edge."""
    eta: float
    """η = 1/(2√(χ1 χ2)): the momentum of A²CiD²."""
    alpha_tilde: float
    """α̃ = ½√(χ1/χ2): the second step size of A²CiD²."""
    spectral_gap: float
    """1 − the second largest modulus of the eigenvalues of the Metropolis–Hastings matrix."""

    @classmethod
    def from_chi(cls, *, chi1: float, chi2: float, spectral_gap: float) -> Constants:
        chi1 = max(chi1, chi2)  # equal on complete graphs, where round-off may swap them
        return cls(
            chi1=chi1,
            chi2=chi2,
            eta=float(0.5 / np.sqrt(chi1 * chi2)),
            alpha_tilde=float(0.5 * np.sqrt(chi1 / chi2)),
            spectral_gap=min(max(spectral_gap, 0.0), 1.0),
        )

    def at_rate(self, rate: float) -> Constants:
        """Convert from rate 1 to ``rate`` exchanges per worker and gradient."""
        return replace(self, chi1=self.chi1 / rate, chi2=self.chi2 / rate, eta=self.eta * rate)


def constants(structure: Structure) -> Constants:
    """Return the constants at rate 1."""
    if structure.workers == 1:
        # One worker always agrees with itself: no momentum, and the largest gap there is.
        return Constants(chi1=0.0, chi2=0.0, eta=0.0, alpha_tilde=0.5, spectral_gap=1.0)
    if isinstance(structure, CayleyGraph):
        return cayley_constants(structure)
    from gossamer.topology import edge_graph_spectra

    return edge_graph_spectra.constants(structure)


def cayley_constants(graph: CayleyGraph) -> Constants:
    """Return exact constants in O(n log n): the eigenvectors are plane waves, so a Fourier transform diagonalizes Λ."""
    origin = (0,) * len(graph.shape)
    neighbours = tuple(graph.offsets.T)
    laplacian = graph.degree - _adjacency_spectrum(graph)
    laplacian[origin] = np.inf
    inverse = np.fft.ifftn(graph.degree / laplacian).real  # the row of worker 0 in Λ⁺
    mixing = 1.0 - laplacian / (1 + graph.degree)
    mixing[origin] = 0.0
    return Constants.from_chi(
        chi1=float(graph.degree / laplacian.min()),
        chi2=float((inverse[origin] - inverse[neighbours]).max()),
        spectral_gap=float(1.0 - np.abs(mixing).max()),
    )


def rate_spectrum(structure: Structure) -> np.ndarray:
    """Return all eigenvalues of Λ but the 0 of the mean, ascending; O(n³) unless the graph is a Cayley graph."""
    if isinstance(structure, CayleyGraph):
        values = 1.0 - _adjacency_spectrum(structure).ravel() / max(1, structure.degree)
    else:
        from gossamer.topology import edge_graph_spectra

        values = edge_graph_spectra.rate_eigenvalues(structure)
    ascending: np.ndarray = np.sort(values)[1:]
    return ascending


def _adjacency_spectrum(graph: CayleyGraph) -> np.ndarray:
    row = np.zeros(graph.shape)
    row[tuple(graph.offsets.T)] = 1.0
    return np.fft.fftn(row).real


def edge_rates(graph: Structure, rate: float = 1.0) -> np.ndarray:
    """Return λ_ij of each edge, in the order of ``graph.edges``."""
    shares = 1.0 / np.maximum(graph.degrees, 1)
    return 0.5 * rate * shares[graph.edges].sum(axis=1)


def mixing_weights(graph: Structure) -> np.ndarray:
    return 1.0 / (1.0 + graph.degrees[graph.edges].max(axis=1))
