"""User input: networkx graphs, edge-list files, and one-line errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.topology import build, describe


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(InputError) as caught:
        build(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_networkx_graph() -> None:
    topology = build(nx.petersen_graph(), workers=10)
    assert topology.num_edges == 15
    assert topology.name == "Petersen Graph"
    assert build(nx.path_graph(3)).workers == 3


def test_directions_and_duplicates_collapse() -> None:
    directed = nx.DiGraph([(0, 1), (1, 0), (1, 2)])
    assert build(directed).edges.tolist() == [[0, 1], [1, 2]]
    assert build(nx.MultiGraph([(0, 1), (0, 1), (2, 1)])).edges.tolist() == [[0, 1], [1, 2]]


def test_the_components_of_a_disconnected_graph_are_listed() -> None:
    graph = nx.disjoint_union(nx.path_graph(3), nx.path_graph(2))
    assert message(graph) == (
        "the graph is in 2 parts that no edge joins: {0, 1, 2} and {3, 4}; add an edge between them"
    )
    long = nx.disjoint_union_all([nx.path_graph(30), nx.path_graph(2), nx.path_graph(2), nx.empty_graph(2)])
    assert message(long) == (
        "the graph is in 5 parts that no edge joins: {0, 1, 2, 3, 4, 5, … 24 more}, {30, 31}, {32, 33} and 2 more; "
        "add edges between them"
    )


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (nx.Graph([("a", "b")]), r"node 'a'.*0\.\.1"),
        (nx.Graph([(1, 2)]), r"node 2.*0\.\.1"),
        (nx.Graph([(0, 1), (1, 1)]), "joins worker 1 to itself"),
        (nx.Graph(), "no nodes"),
    ],
)
def test_graphs_that_cannot_be_used(graph: nx.Graph, expected: str) -> None:
    assert re.search(expected, message(graph))


def test_a_graph_of_another_size() -> None:
    assert "10 nodes but there are 9 workers" in message(nx.petersen_graph(), workers=9)


def test_an_edge_list_file(tmp_path: Path) -> None:
    path = tmp_path / "graph.edges"
    path.write_text("# a square with a tail\n0 1\n1 2  # a comment\n\n2 3\n3,0\n1 0\n3 4\n")
    topology = build(str(path))
    assert topology.workers == 5
    assert topology.edges.tolist() == [[0, 1], [0, 3], [1, 2], [2, 3], [3, 4]]
    assert topology.name == str(path)
    assert np.array_equal(build(path, workers=5).edges, topology.edges)


def test_a_file_in_the_working_directory_needs_no_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text("0 1\n")
    Path("ring").write_text("0 1\n")
    assert build("mine").workers == 2
    assert build("ring", workers=5).workers == 5


@pytest.mark.parametrize(
    ("text", "workers", "expected"),
    [
        ("", None, "has no edges"),
        ("# nothing\n\n", None, "has no edges"),
        ("0 1\n1 two\n", None, "line 2: cannot read '1 two'"),
        ("0 1 2\n", None, "line 1: cannot read '0 1 2'"),
        ("0 -1\n", None, "line 1: cannot read '0 -1'"),
        ("0 1\n\n2 2\n", None, "line 3: joins worker 2 to itself"),
        ("0 1\n1 3\n", None, "no edge of worker 2"),
        ("0 1\n1 2\n", 2, "edge of worker 2, but there are 2 workers"),
        ("0 1\n1 2\n", 4, "in 2 parts that no edge joins: {0, 1, 2} and {3}"),
        ("0 1\n2 3\n", None, "in 2 parts that no edge joins: {0, 1} and {2, 3}"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, workers: int | None, expected: str) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(text)
    assert expected in message(str(path), workers=workers)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no file" in message("missing.txt")
    assert "no file" in message("some/where")
    assert "cannot read" in message(f"{tmp_path}/")
    binary = tmp_path / "image.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in message(str(binary))


@pytest.mark.parametrize("workers", [0, -3, 2.5, "4", True])
def test_invalid_counts(workers: Any) -> None:
    assert f"workers cannot be {workers!r}" in message("ring", workers=workers)
    assert f"nodes cannot be {workers!r}" in message("ring", workers=4, nodes=workers)


def test_numpy_integers_are_counts() -> None:
    assert build("ring", workers=np.int64(5)).workers == 5  # type: ignore[arg-type]


def test_missing_count_and_bad_seed() -> None:
    assert "ring needs a number of workers" in message("ring")
    assert "seed cannot be -1" in message("random-regular", workers=8, seed=-1)
    assert "cannot be a list" in message([1, 2])


def test_unknown_names() -> None:
    assert "unknown topology 'rign'" in message("rign", workers=4)
    assert "Did you mean 'ring'?" in message("rign", workers=4)
    with pytest.raises(InputError, match="unknown topology"):
        describe("nothing")


@pytest.mark.parametrize(
    ("text", "workers", "expected"),
    [
        ("ring:3", 8, "ring takes no option"),
        ("ring:", 8, "ring takes no option"),
        ("torus:4", 16, "rows x columns"),
        ("torus:0x4", 16, "rows x columns"),
        ("torus:axb", 16, "rows x columns"),
        ("torus:4x4", 15, "torus:4x4 has 4 × 4 = 16 workers, not 15"),
        ("random-regular:x", 8, "number of neighbours"),
        ("random-regular:0", 8, "number of neighbours"),
        ("random-regular:3", 9, "both are odd"),
        ("random-regular:1", 8, "cannot join 8 workers"),
        ("erdos-renyi:2", 8, "probability"),
        ("erdos-renyi:nan", 8, "probability"),
        ("erdos-renyi:0.001", 50, "no connected graph of 50 workers"),
        ("base:0", 8, "one less than the largest group"),
        ("base:-1", 8, "one less than the largest group"),
        ("hypercube", 12, "use 8 or 16 workers, or 'exponential'"),
        ("alternating-exponential-ring", 12, "use 8 or 16 nodes, or 'base'"),
    ],
)
def test_options_and_counts_that_do_not_fit(text: str, workers: int, expected: str) -> None:
    assert expected in message(text, workers=workers)


def test_workers_that_do_not_divide_by_their_nodes() -> None:
    assert "use 28 or 32 workers" in message("alternating-exponential-ring", workers=30, nodes=4)
    assert "use 4 or 8 nodes" in message("alternating-exponential-ring", workers=30, nodes=6)
    assert "use 4 workers" in message("alternating-exponential-ring", workers=3, nodes=4)


def test_ranks_and_rates_are_checked() -> None:
    topology = build("ring", workers=4)
    for rank in (4, -1):
        with pytest.raises(InputError, match=r"0\.\.3"):
            topology.neighbours(rank)
        with pytest.raises(InputError, match=r"0\.\.3"):
            topology.group(0, rank)
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="above 0"):
            topology.constants(rate)
        with pytest.raises(InputError, match="above 0"):
            topology.rates(rate)
