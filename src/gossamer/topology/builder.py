"""From what a person gives (a name with options, a networkx graph, a file) to a Topology."""

from __future__ import annotations

import operator
import os

import networkx as nx

from gossamer.errors import InputError, unknown
from gossamer.topology import structures
from gossamer.topology.edgelist import looks_like_a_path, read_edge_list
from gossamer.topology.graphs import GRAPHS, Request
from gossamer.topology.topology import Topology


def names() -> tuple[str, ...]:
    """The names that ``build`` knows."""
    return tuple(GRAPHS)


def describe(name: str) -> str:
    """One line about a named topology."""
    if name not in GRAPHS:
        raise unknown("topology", name, GRAPHS)
    return GRAPHS[name].description


def build(
    topology: str | os.PathLike[str] | nx.Graph,
    workers: int | None = None,
    *,
    nodes: int | None = None,
    seed: int = 0,
) -> Topology:
    """Make a topology.

    Args:
        topology: a name, perhaps with an option after a colon (``ring``, ``torus:4x4``); a networkx graph with
            nodes 0..n-1; or the path of an edge list, one ``i j`` per line.
        workers: how many workers there are; for a graph or a file it may be left out.
        nodes: on how many machines they run, for topologies that care; by default each on its own.
        seed: for random graphs.

    >>> build("ring", workers=4).neighbours(0)
    (1, 3)
    """
    if workers is not None:
        workers = _count("workers", workers)
    if nodes is not None:
        nodes = _count("nodes", nodes)
    if isinstance(topology, nx.Graph):
        return _from_networkx(topology, workers)
    if not isinstance(topology, str | os.PathLike):
        raise InputError(
            f"a topology cannot be a {type(topology).__name__}: "
            "expected a name, a networkx graph or the path of an edge list; give one of these"
        )
    text = os.fspath(topology)
    name, colon, option = text.partition(":")
    if isinstance(topology, str) and name in GRAPHS:
        seed = _count("seed", seed, least=0)
        request = Request(text=text, option=option if colon else None, workers=workers, nodes=nodes, seed=seed)
        return GRAPHS[name].make(request)
    if not isinstance(topology, str) or looks_like_a_path(text):
        graph = read_edge_list(text, workers)
        graph.require_connected()
        return Topology(text, structure=graph)
    raise unknown("topology", text, GRAPHS)


def _from_networkx(graph: nx.Graph, workers: int | None) -> Topology:
    structure = structures.from_networkx(graph)
    if workers is not None and workers != structure.workers:
        raise InputError(
            f"the graph has {structure.workers} nodes but there are {workers} workers: "
            "expected one node for each worker; change one of the two numbers"
        )
    structure.require_connected()
    return Topology(str(graph.name) or "networkx graph", structure=structure)


def _count(what: str, given: object, least: int = 1) -> int:
    try:
        count = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or isinstance(given, bool) or count < least:
        raise InputError(f"{what} cannot be {given!r}: expected a whole number from {least} up; give one")
    return count
