"""The named topologies: edges, neighbours, degrees, notes."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import networkx as nx
import numpy as np
import pytest

from gossamer.topology import Group, Topology, build, describe, names

ANY_COUNT = [name for name in names() if name not in ("hypercube", "alternating-exponential-ring")]


def reference(name: str, n: int) -> nx.Graph:
    """Return the same graph from networkx or from its definition."""
    graph = nx.empty_graph(n)
    if name == "complete":
        graph = nx.complete_graph(n)
    elif name == "ring":
        graph.add_edges_from((i, (i + 1) % n) for i in range(n) if n > 1)
    elif name == "path":
        graph = nx.path_graph(n)
    elif name == "star":
        graph = nx.star_graph(n - 1)
    elif name == "exponential":
        graph.add_edges_from((i, (i + 2**k) % n) for i in range(n) for k in range(n.bit_length()) if 2**k < n)
    elif name == "hypercube":
        graph.add_edges_from((i, i ^ 2**k) for i in range(n) for k in range(n.bit_length() - 1))
    return graph


def edge_set(graph: nx.Graph) -> set[tuple[int, int]]:
    return {(min(edge), max(edge)) for edge in graph.edges}


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *itertools.product(["complete", "ring", "path", "star", "exponential"], [1, 2, 3, 4, 5, 7, 8, 16, 17]),
        *itertools.product(["hypercube"], [1, 2, 4, 8, 16]),
    ],
)
def test_named_graphs_have_the_edges_of_their_definition(name: str, n: int) -> None:
    expected = reference(name, n)
    topology = build(name, workers=n)
    assert {tuple(edge) for edge in topology.edges.tolist()} == edge_set(expected)
    assert topology.edges.dtype == np.int64
    assert topology.edges.shape == (expected.number_of_edges(), 2)
    assert topology.edges.tolist() == sorted(topology.edges.tolist())


@pytest.mark.parametrize("name", ANY_COUNT)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 7, 12, 13, 16, 31])
def test_every_graph_is_consistent_and_connected_for_every_count(name: str, n: int) -> None:
    topology = build(name, workers=n)
    graph = topology.graph()
    assert topology.workers == n
    assert topology.name == name
    assert sorted(graph.nodes) == list(range(n))
    assert nx.is_connected(graph)
    assert topology.num_edges == len(topology.edges) == graph.number_of_edges()
    assert topology.degrees.tolist() == [graph.degree[i] for i in range(n)]
    assert [topology.neighbours(i) for i in range(n)] == [tuple(sorted(graph[i])) for i in range(n)]
    # Each worker takes part in r exchanges per unit of time on average.
    assert topology.rates(2.0).sum() == pytest.approx(2.0 * n / 2 if n > 1 else 0.0)


def test_torus_is_as_square_as_possible() -> None:
    torus = build("torus", workers=12)
    assert set(torus.neighbours(0)) == {1, 3, 4, 8}
    assert torus.note == ""
    assert set(build("torus:2x6").neighbours(0)) == {1, 5, 6}
    prime = build("torus", workers=7)
    assert np.array_equal(prime.edges, build("ring", workers=7).edges)
    assert "ring" in prime.note
    assert "prime" in prime.note


def test_one_peer_exponential_says_when_base_takes_its_place() -> None:
    assert build("one-peer-exponential", workers=16).note == ""
    topology = build("one-peer-exponential", workers=12)
    assert topology.note == "one-peer-exponential needs a power of two; base takes its place for 12 workers"
    assert topology.rounds == build("base", workers=12).rounds


def test_random_regular_has_its_degree_and_follows_its_seed() -> None:
    one, again, other = (build("random-regular:3", workers=16, seed=seed) for seed in (0, 0, 7))
    assert set(one.degrees.tolist()) == {3}
    assert np.array_equal(one.edges, again.edges)
    assert not np.array_equal(one.edges, other.edges)
    small = build("random-regular:4", workers=5)
    assert small.num_edges == 10
    assert "complete" in small.note


def test_erdos_renyi_takes_a_probability() -> None:
    assert build("erdos-renyi:1", workers=9).num_edges == 36
    sparse, dense = (build(f"erdos-renyi:{p}", workers=60, seed=1).num_edges for p in (0.1, 0.5))
    assert sparse == pytest.approx(0.1 * 1770, rel=0.3)
    assert dense == pytest.approx(0.5 * 1770, rel=0.1)


def test_a_big_complete_graph_stores_no_edges() -> None:
    topology = build("complete", workers=10_000)
    assert topology.num_edges == 49_995_000
    assert topology.constants().chi1 == pytest.approx(0.9999)
    assert topology.contraction() < 1e-9
    assert topology.rounds_to_consensus() == 1
    assert len(topology.neighbours(5)) == 9_999
    assert topology.group(3, 77).members == tuple(range(10_000))
    assert "edges" not in vars(topology.structure)


def test_names_and_descriptions() -> None:
    assert names() == (
        "complete", "ring", "path", "star", "torus", "hypercube", "exponential", "one-peer-exponential",
        "alternating-exponential-ring", "random-regular", "erdos-renyi", "base",
    )  # fmt: skip
    for name in names():
        assert describe(name)
        assert "\n" not in describe(name)


@pytest.mark.parametrize("text", ["ring", "torus:4x4", "base:2", "one-peer-exponential", "random-regular:3"])
def test_a_topology_survives_pickling(text: str) -> None:
    topology = build(text, workers=16)
    copy = pickle.loads(pickle.dumps(topology))
    assert isinstance(copy, Topology)
    assert np.array_equal(copy.edges, topology.edges)
    assert copy.group(1, 3) == topology.group(1, 3)
    assert isinstance(copy.group(0, 0), Group)


def test_the_constants_of_a_ring_need_neither_torch_nor_scipy_nor_networkx() -> None:
    code = """
import sys
from gossamer.topology import build
ring = build("ring", workers=16)
ring.constants(), ring.contraction(), ring.rounds_to_consensus(), ring.neighbours(0), ring.group(0, 0)
print(sorted({"torch", "scipy", "networkx", "matplotlib"} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
