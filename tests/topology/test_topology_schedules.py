"""Schedules of rounds: valid, mean-preserving, and exactly in agreement where they promise it."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.topology import Topology, build, mixing, schedules


def matrix(topology: Topology, round: int) -> np.ndarray:
    """Return the mixing matrix of a round, from its definition and the public API."""
    n = topology.workers
    mixing_matrix = np.zeros((n, n))
    for i in range(n):
        group = topology.group(round, i)
        mixing_matrix[i, i] += 1 - group.strength
        mixing_matrix[i, list(group.members)] += group.strength / len(group.members)
    return mixing_matrix


def product(topology: Topology, num_rounds: int) -> np.ndarray:
    result = np.eye(topology.workers)
    for round in range(num_rounds):
        result = matrix(topology, round) @ result
    return result


def check_valid(topology: Topology) -> None:
    n = topology.workers
    assert topology.period >= 1
    for round in range(topology.period):
        groups = {topology.group(round, i) for i in range(n)}
        assert sorted(i for group in groups for i in group.members) == list(range(n))
        assert all(i in topology.group(round, i).members for i in range(n))
        assert all(list(group.members) == sorted(group.members) for group in groups)
        mixing_matrix = matrix(topology, round)
        assert mixing_matrix.min() >= -1e-15
        assert np.allclose(mixing_matrix.sum(axis=0), 1, atol=1e-13)
        assert np.allclose(mixing_matrix.sum(axis=1), 1, atol=1e-13)
        assert topology.group(round + topology.period, n - 1) == topology.group(round, n - 1)
        allowed = {tuple(edge) for edge in topology.edges.tolist()}
        assert all((i, j) in allowed for group in groups for i in group.members for j in group.members if i < j)


def check_exact(topology: Topology) -> None:
    n = topology.workers
    assert np.abs(product(topology, topology.period) - 1 / n).max() < 1e-12
    assert topology.contraction() < 1e-10
    rounds = topology.rounds_to_consensus()
    assert rounds is not None
    assert rounds <= topology.period
    assert np.abs(product(topology, rounds) - 1 / n).max() < 1e-9
    if rounds > 0:
        assert np.abs(product(topology, rounds - 1) - 1 / n).max() > 1e-9


@pytest.mark.parametrize("name", ["ring", "path", "star", "torus", "exponential", "random-regular", "erdos-renyi"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 12, 15, 16])
def test_graphs_without_a_schedule_of_their_own_use_every_edge_once(name: str, n: int) -> None:
    topology = build(name, workers=n)
    check_valid(topology)
    used = [group.members for groups in topology.rounds for group in groups]
    assert sorted(used) == [tuple(edge) for edge in topology.edges.tolist()]
    assert all(group.strength == 1.0 for groups in topology.rounds for group in groups)


@pytest.mark.parametrize(("n", "period"), [(1, 1), (2, 1), (3, 3), (4, 2), (7, 3), (16, 2), (33, 3)])
def test_a_ring_needs_two_rounds_or_three(n: int, period: int) -> None:
    assert build("ring", workers=n).period == period


def test_an_even_torus_needs_four_rounds() -> None:
    assert build("torus", workers=16).period == 4


@pytest.mark.parametrize("n", range(1, 34))
def test_one_peer_exponential_and_complete_agree_exactly(n: int) -> None:
    for name in ("one-peer-exponential", "complete"):
        topology = build(name, workers=n)
        check_valid(topology)
        check_exact(topology)
    if n & (n - 1) == 0 and n > 1:
        one_peer = build("one-peer-exponential", workers=n)
        assert one_peer.period == n.bit_length() - 1
        for round in range(one_peer.period):
            assert all(set(one_peer.group(round, i).members) == {i, i ^ 2**round} for i in range(n))


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32])
def test_hypercube_agrees_after_one_round_per_dimension(n: int) -> None:
    topology = build("hypercube", workers=n)
    check_valid(topology)
    check_exact(topology)
    assert topology.period == max(1, n.bit_length() - 1)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("n", range(1, 41))
def test_base_agrees_exactly_in_small_groups(k: int, n: int) -> None:
    topology = build(f"base:{k}", workers=n)
    check_valid(topology)
    check_exact(topology)
    assert max(len(topology.group(r, i).members) for r in range(topology.period) for i in range(n)) <= k + 1


@pytest.mark.parametrize("n", range(1, 130))
def test_base_2_needs_no_more_rounds_than_the_papers(n: int) -> None:
    power = n.bit_length() - 1
    assert build("base", workers=n).period <= 2 * power + 1
    assert build("base", workers=2**power).period == max(power, 1)


def test_base_takes_the_shorter_of_its_two_splits() -> None:
    assert build("base", workers=6).period == 4  # 3 for each block of three, 1 across; splitting 4 + 2 takes 5
    assert build("base", workers=3).period == 3
    assert build("base", workers=7).period == 5
    assert build("base:2", workers=27).period == 3
    assert build("base:3", workers=16).period == 2
    assert schedules.fewest_factors(16, 4) == (4, 4)
    assert schedules.fewest_factors(12, 6) in ((6, 2), (4, 3))
    assert schedules.fewest_factors(14, 4) is None


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 5), (2, 1), (2, 3), (4, 1), (4, 2), (8, 4), (16, 3)])
def test_alternating_exponential_ring_agrees_exactly(nodes: int, per_node: int) -> None:
    topology = build("alternating-exponential-ring", workers=nodes * per_node, nodes=nodes)
    check_valid(topology)
    check_exact(topology)
    assert topology.period == max(1, 2 * (nodes.bit_length() - 1))


def test_half_of_the_nodes_of_an_alternating_exponential_ring_average_inside() -> None:
    topology = build("alternating-exponential-ring", workers=32, nodes=8)
    for round in range(topology.period):
        sizes = [len(topology.group(round, rank).members) for rank in range(32)]
        assert sorted(sizes) == [4] * 16 + [8] * 16
    for rank in range(32):
        first, second = topology.group(0, rank), topology.group(1, rank)
        assert {len(first.members), len(second.members)} == {4, 8}


def test_contraction_of_schedules_that_never_quite_agree() -> None:
    # Two projections, on pairs and on shifted pairs: the cosine of the angle between them.
    assert build("ring", workers=16).contraction() == pytest.approx(np.cos(2 * np.pi / 16), rel=1e-12)
    assert build("ring", workers=16).rounds_to_consensus() is None
    star = build("star", workers=6)
    deviation = product(star, star.period) - 1 / 6
    assert star.contraction() == pytest.approx(np.linalg.svd(deviation, compute_uv=False)[0], rel=1e-12)
    assert star.rounds_to_consensus() is None


def test_one_worker_always_agrees() -> None:
    for name in ("ring", "base", "star", "complete"):
        topology = build(name, workers=1)
        assert topology.contraction() == 0.0
        assert topology.rounds_to_consensus() == 0
        assert topology.group(5, 0).members == (0,)


@pytest.mark.parametrize("text", ["ring", "path", "torus", "random-regular", "star"])
def test_contraction_of_many_workers_agrees_with_few(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = build(text, workers=60)
    monkeypatch.setattr(mixing, "DENSE_WORKERS", 10)
    assert mixing.contraction(60, exact.rounds) == pytest.approx(exact.contraction(), rel=1e-5)
    assert mixing.rounds_to_consensus(60, exact.rounds) is None
    assert mixing.rounds_to_consensus(64, build("hypercube", workers=64).rounds) == 6


def test_contraction_of_a_long_ring_is_its_closed_form() -> None:
    topology = build("ring", workers=10_000)
    assert 1 - topology.contraction() == pytest.approx(1 - np.cos(2 * np.pi / 10_000), rel=1e-4)
    assert build("base", workers=1_001).rounds_to_consensus() == build("base", workers=1_001).period


@settings(max_examples=60, deadline=None, derandomize=True)
@given(n=st.integers(2, 24), extra=st.integers(0, 60), seed=st.integers(0, 2**31 - 1))
def test_any_connected_graph_is_coloured_properly(n: int, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = nx.Graph([(int(rng.integers(i)), i) for i in range(1, n)])  # a random tree, and more
    pairs = rng.integers(n, size=(extra, 2)).tolist()
    graph.add_edges_from((i, j) for i, j in pairs if i != j)
    topology = build(graph)
    check_valid(topology)
    used = [group.members for groups in topology.rounds for group in groups]
    assert sorted(used) == [tuple(edge) for edge in topology.edges.tolist()]
    assert topology.period <= 2 * max(topology.degrees) - 1
    constants = topology.constants()
    assert constants.chi1 >= constants.chi2 > 0
    assert 0 <= constants.spectral_gap <= 1
