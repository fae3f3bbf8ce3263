"""The constants of graphs, compared with check values, closed forms and each other."""

from __future__ import annotations

import dataclasses
import itertools

import networkx as nx
import numpy as np
import pytest

from gossamer.topology import Constants, build
from gossamer.topology.edge_graph_spectra import (
    dense_constants,
    largest_resistance,
    sketched_largest_resistance,
    sparse_constants,
)
from gossamer.topology.laplacian import Laplacian
from gossamer.topology.spectra import edge_rates
from gossamer.topology.structures import EdgeGraph


def assert_alike(one: Constants, other: Constants, rel: float) -> None:
    assert dataclasses.asdict(one) == pytest.approx(dataclasses.asdict(other), rel=rel)


@pytest.mark.parametrize(
    ("name", "n", "chi1", "chi2", "eta", "alpha_tilde"),
    [("ring", 16, 13.1, 0.94, 0.143, 1.87), ("ring", 64, 207.7, 0.98, 0.035, 7.26)],
)
def test_check_values(name: str, n: int, chi1: float, chi2: float, eta: float, alpha_tilde: float) -> None:
    # To the digits printed in methods.md, where η = 0.14247 of the ring of 16 is printed as 0.143.
    constants = build(name, workers=n).constants()
    assert constants.chi1 == pytest.approx(chi1, abs=0.051)
    assert constants.chi2 == pytest.approx(chi2, abs=0.0051)
    assert constants.eta == pytest.approx(eta, abs=0.00055)
    assert constants.alpha_tilde == pytest.approx(alpha_tilde, abs=0.0051)


def test_check_values_of_complete() -> None:
    constants = build("complete", workers=64).constants()
    assert constants.chi1 == pytest.approx(63 / 64, rel=1e-12)
    assert constants.chi2 == pytest.approx(63 / 64, rel=1e-12)
    assert constants.alpha_tilde == pytest.approx(0.5, rel=1e-12)
    assert constants.alpha_tilde >= 0.5
    assert constants.spectral_gap == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("n", range(1, 40))
def test_alpha_tilde_of_complete_graphs_is_not_below_one_half(n: int) -> None:
    for topology in (build("complete", workers=n), build(nx.complete_graph(n))):
        constants = topology.constants()
        assert constants.chi1 >= constants.chi2
        assert 0.5 <= constants.alpha_tilde < 0.5 + 1e-9


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *itertools.product(["ring", "torus", "exponential", "complete"], range(1, 21)),
        *itertools.product(["hypercube"], [1, 2, 4, 8, 16]),
    ],
)
def test_fourier_agrees_with_dense(name: str, n: int) -> None:
    topology = build(name, workers=n)
    as_edges = build(topology.graph())
    assert isinstance(as_edges.structure, EdgeGraph)
    assert_alike(topology.constants(), as_edges.constants(), rel=1e-9)


def test_dense_constants_by_their_definition() -> None:
    graph = build("erdos-renyi:0.3", workers=12, seed=3)
    laplacian = np.zeros((12, 12))
    for (i, j), rate in zip(graph.edges, graph.rates(1.0), strict=True):
        assert rate == pytest.approx(0.5 * (1 / graph.degrees[i] + 1 / graph.degrees[j]))
        difference = np.zeros(12)
        difference[i], difference[j] = 1, -1
        laplacian += rate * np.outer(difference, difference)
    inverse = np.linalg.pinv(laplacian)
    chi1 = 1 / np.linalg.eigvalsh(laplacian)[1]
    chi2 = max(inverse[i, i] + inverse[j, j] - 2 * inverse[i, j] for i, j in graph.edges) / 2
    mixing = np.zeros((12, 12))
    for i, j in graph.edges:
        mixing[i, j] = mixing[j, i] = 1 / (1 + max(graph.degrees[i], graph.degrees[j]))
    mixing += np.diag(1 - mixing.sum(axis=1))
    constants = graph.constants()
    assert constants.chi1 == pytest.approx(chi1)
    assert constants.chi2 == pytest.approx(chi2)
    assert constants.eta == pytest.approx(1 / (2 * np.sqrt(chi1 * chi2)))
    assert constants.alpha_tilde == pytest.approx(np.sqrt(chi1 / chi2) / 2)
    assert constants.spectral_gap == pytest.approx(1 - sorted(np.abs(np.linalg.eigvalsh(mixing)))[-2])


@pytest.mark.parametrize(
    "graph",
    [
        nx.path_graph(150),
        nx.star_graph(149),
        nx.random_labeled_tree(150, seed=1),
        nx.ladder_graph(75),
        nx.barbell_graph(20, 100),
        nx.convert_node_labels_to_integers(nx.grid_2d_graph(10, 15)),
        nx.random_regular_graph(3, 150, seed=1),
        nx.gnp_random_graph(150, 0.08, seed=1),
        nx.complete_bipartite_graph(5, 145),
        nx.complete_graph(60),
    ],
    ids=["path", "star", "tree", "ladder", "barbell", "grid", "regular", "gnp", "bipartite", "complete"],
)
def test_sparse_agrees_with_dense(graph: nx.Graph) -> None:
    structure = build(graph).structure
    assert isinstance(structure, EdgeGraph)
    exact = dense_constants(structure)
    assert_alike(sparse_constants(structure), exact, rel=1e-6)
    # Without the full inverse, χ2 is the resistance of the best of 256 candidates.
    sketched = sparse_constants(structure, inverse_workers=0)
    assert sketched.chi2 == pytest.approx(exact.chi2, rel=0.02)
    assert sketched.chi2 <= exact.chi2 * (1 + 1e-6)
    assert sketched.chi1 == pytest.approx(exact.chi1, rel=1e-6)


def test_conjugate_gradients_agree_with_the_factorization() -> None:
    structure = build("random-regular:3", workers=300).structure
    assert isinstance(structure, EdgeGraph)
    laplacian = Laplacian(structure, edge_rates(structure))
    right = np.random.default_rng(0).standard_normal((300, 4))
    right -= right.mean(axis=0)
    by_iteration = laplacian._conjugate_gradients(right)
    by_iteration -= by_iteration.mean(axis=0)
    assert np.allclose(by_iteration, laplacian.solve(right), atol=1e-7)
    assert np.allclose(by_iteration, laplacian.pseudo_inverse() @ right, atol=1e-7)
    vars(laplacian)["_solver"] = laplacian._conjugate_gradients
    assert laplacian.second_eigenvalue() == pytest.approx(np.linalg.eigvalsh(laplacian.matrix.toarray())[1], rel=1e-6)
    assert sketched_largest_resistance(laplacian) == pytest.approx(largest_resistance(laplacian), rel=0.02)


def test_constants_scale_with_the_rate() -> None:
    topology = build("torus", workers=20)
    one, three = topology.constants(), topology.constants(rate=3.0)
    assert three.chi1 == pytest.approx(one.chi1 / 3)
    assert three.chi2 == pytest.approx(one.chi2 / 3)
    assert three.eta == pytest.approx(one.eta * 3)
    assert three.alpha_tilde == one.alpha_tilde
    assert three.spectral_gap == one.spectral_gap
    assert np.allclose(topology.rates(3.0), 3 * topology.rates())


def test_constants_of_one_worker() -> None:
    for topology in (build("ring", workers=1), build("path", workers=1), build("base", workers=1)):
        assert topology.constants(2.0) == Constants(chi1=0.0, chi2=0.0, eta=0.0, alpha_tilde=0.5, spectral_gap=1.0)


def test_big_ring_and_torus_have_their_closed_forms() -> None:
    # Degree 2, so each edge fires at r/2 and λ_2 = 1 − cos(2π/n); by symmetry every edge has R = (n−1)/E / λ_e.
    n = 10_000
    ring = build("ring", workers=n).constants()
    assert ring.chi1 == pytest.approx(1 / (2 * np.sin(np.pi / n) ** 2), rel=1e-7)
    assert ring.chi2 == pytest.approx((n - 1) / n, rel=1e-9)
    assert ring.spectral_gap == pytest.approx(4 / 3 * np.sin(np.pi / n) ** 2, rel=1e-7)
    torus = build("torus", workers=n).constants()
    assert torus.chi1 == pytest.approx(1 / np.sin(np.pi / 100) ** 2, rel=1e-9)
    assert torus.chi2 == pytest.approx((n - 1) / n, rel=1e-9)
    assert torus.spectral_gap == pytest.approx(4 / 5 * np.sin(np.pi / 100) ** 2, rel=1e-9)


def test_big_path_and_star_have_their_closed_forms() -> None:
    star = build("star", workers=10_000).constants()
    rate = 0.5 * (1 + 1 / 9_999)
    assert star.chi1 == pytest.approx(1 / rate, rel=1e-6)
    assert star.chi2 == pytest.approx(0.5 / rate, rel=1e-12)
    assert star.spectral_gap == pytest.approx(1 / 10_000, rel=1e-6)
    path = build("path", workers=10_000).constants()
    assert path.chi2 == pytest.approx(1.0, rel=1e-12)
    assert path.spectral_gap == pytest.approx(4 / 3 * np.sin(np.pi / 20_000) ** 2, rel=1e-6)


def test_big_random_graphs() -> None:
    regular = build("random-regular", workers=4_000).constants()
    # A random 4-regular graph is nearly optimal: λ_2 of the adjacency is near 2√3 (Friedman).
    assert 1 / regular.chi1 == pytest.approx(1 - np.sqrt(3) / 2, rel=0.05)
    assert regular.chi2 == pytest.approx(1.0, rel=0.05)
    structure = build("random-regular", workers=600).structure
    assert isinstance(structure, EdgeGraph)
    assert_alike(sparse_constants(structure), dense_constants(structure), rel=1e-6)
