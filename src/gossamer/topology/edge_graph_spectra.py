"""The constants of graphs stored as edges: dense, or by Lanczos iteration and sketches for many workers.

Imports scipy and networkx.
"""

from __future__ import annotations

import networkx as nx
import numpy as np
from scipy import linalg

from gossamer.topology.laplacian import Laplacian
from gossamer.topology.spectra import Constants, edge_rates, mixing_weights
from gossamer.topology.structures import EdgeGraph

MAX_DENSE_WORKERS = 400
"""Up to here, all eigenvalues are computed."""
MAX_INVERSE_WORKERS = 2000
"""Up to here, Λ⁺ is computed (32 MB) and χ2 is exact."""
NUM_SKETCH_COLUMNS = 256
NUM_CANDIDATES = 256
MAX_EDGES_PER_WORKER_FOR_BRIDGES = 2
"""In denser graphs bridges are rare, and the search for them takes longer than it saves."""


def constants(graph: EdgeGraph) -> Constants:
    return dense_constants(graph) if graph.workers <= MAX_DENSE_WORKERS else sparse_constants(graph)


def dense_constants(graph: EdgeGraph) -> Constants:
    """Return exact constants in O(n³), from all eigenvalues and the dense inverse."""
    rates = Laplacian(graph, edge_rates(graph))
    values = linalg.eigvalsh(rates.matrix.toarray())
    mixing = np.eye(graph.workers) - Laplacian(graph, mixing_weights(graph)).matrix.toarray()
    others = linalg.eigvalsh(mixing)[:-1]
    return Constants.from_chi(
        chi1=float(1.0 / values[1]),
        chi2=0.5 * largest_resistance(rates),
        spectral_gap=float(1.0 - np.abs(others).max()),
    )


def sparse_constants(graph: EdgeGraph, inverse_workers: int = MAX_INVERSE_WORKERS) -> Constants:
    """Return the constants by Lanczos iteration.

    χ2 is exact on trees and up to ``inverse_workers``; beyond, it is what ``sketched_largest_resistance`` finds.
    """
    rates = Laplacian(graph, edge_rates(graph))
    largest = largest_resistance if graph.workers <= inverse_workers else sketched_largest_resistance
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


def largest_resistance(laplacian: Laplacian) -> float:
    """Return the largest effective resistance R_e = (e_i − e_j)ᵀ L⁺ (e_i − e_j) of an edge, from the dense L⁺."""
    inverse = laplacian.pseudo_inverse()
    i, j = laplacian.graph.edges.T
    return float((inverse[i, i] + inverse[j, j] - 2 * inverse[i, j]).max())


def sketched_largest_resistance(laplacian: Laplacian) -> float:
    """Return the same for big graphs: exact on bridges, else the best of the edges that a random sketch ranks highest.

    A bridge has R_e = 1/w_e, the most that an edge of weight w_e can have. For the other edges, R_e is the squared
    distance between columns i and j of √w B L⁺ (B: the incidence matrix). ``NUM_SKETCH_COLUMNS`` random signs estimate
    such distances to about 9 % (Johnson, Lindenstrauss), which is enough to select candidates. The R_e of the best
    ``NUM_CANDIDATES`` are then computed exactly, so the result is the R_e of some edge and never too large. How much
    too small it can be is not bounded: it was 0 to 1.7 % on four graphs of 2,000 workers (random-regular of degree 3
    and 4, Erdős–Rényi, base; one seed each), on which both numbers were also chosen.
    """
    bridges = _bridges(laplacian)
    best = float((1.0 / laplacian.weights[bridges]).max(initial=0.0))
    others = np.flatnonzero(~bridges & (1.0 / laplacian.weights > best * (1 + 1e-12)))
    if len(others) == 0:
        return best
    candidates = others[np.argsort(-_sketched(laplacian, others), kind="stable")[:NUM_CANDIDATES]]
    return max(best, float(_exact(laplacian, candidates).max()))


def _bridges(laplacian: Laplacian) -> np.ndarray:
    """Return for each edge whether it is a bridge; all False where the graph is too dense to search."""
    graph = laplacian.graph
    if graph.num_edges == graph.workers - 1:
        return np.ones(graph.num_edges, dtype=bool)
    is_bridge = np.zeros(graph.num_edges, dtype=bool)
    if graph.num_edges <= MAX_EDGES_PER_WORKER_FOR_BRIDGES * graph.workers:
        pairs = {(min(pair), max(pair)) for pair in nx.bridges(nx.Graph(graph.edges.tolist()))}
        is_bridge[:] = [tuple(edge) in pairs for edge in graph.edges.tolist()]
    return is_bridge


def _sketched(laplacian: Laplacian, edges: np.ndarray) -> np.ndarray:
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(laplacian.graph.num_edges, NUM_SKETCH_COLUMNS))
    flows = signs * np.sqrt(laplacian.weights)[:, None]
    i, j = laplacian.graph.edges.T
    sources = np.zeros((laplacian.graph.workers, NUM_SKETCH_COLUMNS))
    np.add.at(sources, i, flows)
    np.subtract.at(sources, j, flows)
    potentials = laplacian.solve(sources)
    distances: np.ndarray = ((potentials[i[edges]] - potentials[j[edges]]) ** 2).sum(axis=1)
    return distances


def _exact(laplacian: Laplacian, edges: np.ndarray) -> np.ndarray:
    i, j = laplacian.graph.edges[edges].T
    column = np.arange(len(edges))
    sources = np.zeros((laplacian.graph.workers, len(edges)))
    sources[i, column] = 1.0
    sources[j, column] = -1.0
    potentials = laplacian.solve(sources)
    differences: np.ndarray = potentials[i, column] - potentials[j, column]
    return differences
