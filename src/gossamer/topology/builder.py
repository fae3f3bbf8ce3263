"""Build a Topology from a name with options, a networkx graph, or an edge-list file."""

from __future__ import annotations

import contextlib
import operator
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gossamer.errors import InputError, unknown
from gossamer.topology import structures
from gossamer.topology.graphs import GRAPHS, Request
from gossamer.topology.structures import EdgeGraph
from gossamer.topology.topology import Topology

if TYPE_CHECKING:
    import networkx as nx

EDGE_LIST_SUFFIXES = (".txt", ".edges", ".edgelist", ".csv")


def names() -> tuple[str, ...]:
    """Return the names that ``build`` accepts."""
    return tuple(GRAPHS)


def describe(name: str) -> str:
    """Return one line about a named topology."""
    if name not in GRAPHS:
        raise unknown("topology", name, GRAPHS)
    return GRAPHS[name].description


def uses_nodes(topology: str) -> bool:
    """Return whether a topology, given as for ``build``, depends on the number of nodes."""
    name = topology.partition(":")[0]
    return name in GRAPHS and GRAPHS[name].uses_nodes


def fits(topology: str, workers: int, nodes: int | None = None) -> bool:
    """Return whether ``build`` accepts this topology for these numbers of workers and nodes."""
    try:
        build(topology, workers=workers, nodes=nodes)
    except InputError:
        return False
    return True


def build(
    topology: str | os.PathLike[str] | nx.Graph,
    workers: int | None = None,
    *,
    nodes: int | None = None,
    seed: int = 0,
) -> Topology:
    """Build a topology.

    Args:
        topology: A name, with an option after a colon if it takes one (``ring``, ``torus:4x4``); a networkx graph with
            nodes 0..n-1; or the path of an edge list, one ``i j`` per line.
        workers: Number of workers; optional for a graph or a file.
        nodes: Number of machines that they run on, for topologies that depend on it; by default one per worker.
        seed: Seed of random graphs.

    Examples:
        >>> build("ring", workers=4).neighbours(0)
        (1, 3)
    """
    if workers is not None:
        workers = _count("workers", workers)
    if nodes is not None:
        nodes = _count("nodes", nodes)
    if not isinstance(topology, str | os.PathLike):
        return _from_networkx(topology, workers)
    text = os.fspath(topology)
    name, colon, option = text.partition(":")
    if isinstance(topology, str) and name in GRAPHS:
        seed = _count("seed", seed, minimum=0)
        request = Request(text=text, option=option if colon else None, workers=workers, nodes=nodes, seed=seed)
        built = GRAPHS[name].make(request)
        built.spec = text, nodes, seed
        return built
    if not isinstance(topology, str) or _is_path(text):
        graph = _read_edge_list(text, workers)
        graph.require_connected()
        return Topology(text, structure=graph)
    raise unknown("topology", text, GRAPHS)


def resized(topology: Topology, workers: int) -> Topology:
    """Return the topology of the same name for another number of workers; a ring if there is none of that size.

    Examples:
        >>> resized(build("hypercube", workers=4), 8).name
        'hypercube'
        >>> resized(build("hypercube", workers=4), 5).name
        'ring'
    """
    if workers == topology.workers:
        return topology
    if topology.spec is not None:
        text, nodes, seed = topology.spec
        for name in dict.fromkeys((text, text.partition(":")[0])):
            for machines in dict.fromkeys((nodes, None)):
                with contextlib.suppress(InputError):
                    return build(name, workers=workers, nodes=machines, seed=seed)
    return build("ring", workers=workers)


def _count(what: str, value: object, minimum: int = 1) -> int:
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or isinstance(value, bool) or count < minimum:
        raise InputError(f"{what} cannot be {value!r}: expected a whole number from {minimum} up; give one")
    return count


def _from_networkx(graph: nx.Graph, workers: int | None) -> Topology:
    import networkx as nx

    if not isinstance(graph, nx.Graph):
        raise InputError(
            f"a topology cannot be a {type(graph).__name__}: "
            "expected a name, a networkx graph or the path of an edge list; give one of these"
        )
    structure = structures.from_networkx(graph)
    if workers is not None and workers != structure.workers:
        raise InputError(
            f"the graph has {structure.workers} nodes but there are {workers} workers: "
            "expected one node for each worker; change one of the two numbers"
        )
    structure.require_connected()
    return Topology(str(graph.name) or "networkx graph", structure=structure)


def _is_path(text: str) -> bool:
    """Whether a text names a file: by its suffix, by a path separator, or because the file exists."""
    return text.lower().endswith(EDGE_LIST_SUFFIXES) or "/" in text or os.sep in text or os.path.isfile(text)


def _read_edge_list(path: str, workers: int | None) -> EdgeGraph:
    """Read an edge list: one ``i j`` per line, ``#`` starts a comment.

    Without ``workers``, the largest rank says how many there are.
    """
    edges = _parse_edges(path)
    num_named = max(max(edge) for edge in edges) + 1
    if workers is not None and num_named > workers:
        raise InputError(
            f"{path} has an edge of worker {num_named - 1}, but there are {workers} workers (0..{workers - 1}): "
            f"ask for {num_named} workers, or remove the edge"
        )
    missing = sorted(set(range(num_named)) - {rank for edge in edges for rank in edge})
    if workers is None and missing:
        raise InputError(
            f"{path} names worker {num_named - 1} but has no edge of worker {missing[0]}: expected workers "
            "0..n-1 without gaps; renumber them, or add its edges"
        )
    return EdgeGraph(workers or num_named, np.array(edges, dtype=np.int64))


def _parse_edges(path: str) -> list[tuple[int, int]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"no file {path}: expected an edge list, one 'i j' per line; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} ({error}): expected an edge list as text, one 'i j' per line") from None
    edges = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
            raise InputError(
                f"{path}, line {number}: cannot read {line.strip()!r}: expected two worker numbers, as in '0 1'"
            )
        i, j = int(words[0]), int(words[1])
        if i == j:
            raise InputError(f"{path}, line {number}: joins worker {i} to itself; remove the line")
        edges.append((i, j))
    if not edges:
        raise InputError(f"{path} has no edges: expected one 'i j' per line; add some")
    return edges
