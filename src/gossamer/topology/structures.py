"""The two forms in which a graph is stored: its list of edges, or the offsets of a Cayley graph."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gossamer.errors import InputError

if TYPE_CHECKING:
    import networkx as nx
    from scipy import sparse

NUM_PARTS_SHOWN = 3
NUM_MEMBERS_SHOWN = 8


class EdgeGraph:
    """A graph stored as its edges: an int64 array [E, 2] with i < j, sorted, without duplicates."""

    def __init__(self, workers: int, edges: np.ndarray) -> None:
        self.workers = workers
        self.edges = sorted_edges(edges)

    @property
    def num_edges(self) -> int:
        return len(self.edges)

    @cached_property
    def degrees(self) -> np.ndarray:
        return np.bincount(self.edges.ravel(), minlength=self.workers).astype(np.int64)

    @cached_property
    def _neighbour_lists(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each worker's list starts (and the end of the last), and all lists one after the other."""
        workers, neighbours = np.concatenate([self.edges, self.edges[:, ::-1]]).T
        return np.concatenate([[0], np.cumsum(self.degrees)]), neighbours[np.lexsort((neighbours, workers))]

    def neighbours(self, rank: int) -> tuple[int, ...]:
        starts, neighbours = self._neighbour_lists
        return tuple(neighbours[starts[rank] : starts[rank + 1]].tolist())

    def matrix(self, weights: np.ndarray) -> sparse.csr_matrix:
        """Return the symmetric matrix with ``weights[e]`` at (i, j) and (j, i) for each edge e, columns sorted."""
        from scipy import sparse

        i, j = self.edges.T
        rows, columns = np.concatenate([i, j]), np.concatenate([j, i])
        shape = (self.workers, self.workers)
        matrix = sparse.csr_matrix((np.concatenate([weights, weights]), (rows, columns)), shape=shape)
        matrix.sort_indices()
        return matrix

    def require_connected(self) -> None:
        """Raise an InputError that lists the components if there are several."""
        from scipy.sparse import csgraph

        adjacency = self.matrix(np.ones(self.num_edges))
        num_parts, labels = csgraph.connected_components(adjacency, directed=False)
        if num_parts == 1:
            return
        parts = [np.flatnonzero(labels == part).tolist() for part in range(min(num_parts, NUM_PARTS_SHOWN))]
        shown = [_shortened(part) for part in parts]
        if num_parts > NUM_PARTS_SHOWN:
            shown.append(f"{num_parts - NUM_PARTS_SHOWN} more")
        listed = ", ".join(shown[:-1]) + " and " + shown[-1]
        remedy = "add an edge between them" if num_parts == 2 else "add edges between them"
        raise InputError(f"the graph is in {num_parts} parts that no edge joins: {listed}; {remedy}")


class CayleyGraph:
    """A graph that looks the same from every worker.

    Rank r is a point of Z_a × Z_b × …, and r + s is its neighbour for each offset s. ``shape`` is (a, b, …); ranks
    number the points in C order. ``offsets`` is an int array [any number, dimensions]; the constructor adds −s for
    every s and drops 0. Edges are not stored, so a complete graph of 10,000 workers takes no memory.
    """

    def __init__(self, shape: tuple[int, ...], offsets: np.ndarray) -> None:
        self.shape = shape
        self.workers = math.prod(shape)
        signed = np.concatenate([offsets, -offsets]) % np.array(shape)
        self.offsets = distinct_rows(signed[signed.any(axis=1)])

    @property
    def degree(self) -> int:
        return len(self.offsets)

    @property
    def num_edges(self) -> int:
        return self.workers * self.degree // 2

    @property
    def degrees(self) -> np.ndarray:
        return np.full(self.workers, self.degree, dtype=np.int64)

    @cached_property
    def edges(self) -> np.ndarray:
        points = np.stack(np.unravel_index(np.arange(self.workers), self.shape), axis=-1)
        shifted = (points[:, None, :] + self.offsets[None, :, :]) % np.array(self.shape)
        ends = np.ravel_multi_index(tuple(np.moveaxis(shifted, -1, 0)), self.shape)
        starts = np.broadcast_to(np.arange(self.workers)[:, None], ends.shape)
        return sorted_edges(np.stack([starts[starts < ends], ends[starts < ends]], axis=-1))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        point = np.array(np.unravel_index(rank, self.shape))
        shifted = (point + self.offsets) % np.array(self.shape)
        return tuple(np.sort(np.ravel_multi_index(tuple(shifted.T), self.shape)).tolist())


Structure = EdgeGraph | CayleyGraph


def sorted_edges(edges: np.ndarray) -> np.ndarray:
    """Return edges in their canonical order: i < j, sorted, each once."""
    pairs = np.sort(np.asarray(edges, dtype=np.int64).reshape(-1, 2), axis=1)
    return distinct_rows(pairs)


def distinct_rows(rows: np.ndarray) -> np.ndarray:
    """Return the rows sorted, each once. numpy's ``unique`` would load its masked arrays too, in each worker."""
    rows = rows[np.lexsort(rows.T[::-1])]
    return rows[np.concatenate([[True], (rows[1:] != rows[:-1]).any(axis=1)])[: len(rows)]]


def from_networkx(graph: nx.Graph) -> EdgeGraph:
    """Convert a networkx graph with nodes 0..n-1, ignoring directions and parallel edges."""
    workers = graph.number_of_nodes()
    if workers == 0:
        raise InputError("the graph has no nodes: expected nodes 0..n-1, one for each worker; add some")
    invalid = [node for node in graph.nodes if not _is_rank(node, workers)]
    if invalid:
        raise InputError(
            f"the graph has a node {invalid[0]!r}: expected the {workers} nodes to be 0..{workers - 1}; "
            "renumber them with networkx.convert_node_labels_to_integers(graph)"
        )
    loops = sorted(i for i, j in graph.edges() if i == j)
    if loops:
        raise InputError(
            f"the graph joins worker {loops[0]} to itself: expected edges between two workers; "
            "remove it with graph.remove_edges_from(networkx.selfloop_edges(graph))"
        )
    return EdgeGraph(workers, np.array([(int(i), int(j)) for i, j in graph.edges()], dtype=np.int64))


def _is_rank(node: object, workers: int) -> bool:
    return isinstance(node, int | np.integer) and not isinstance(node, bool) and 0 <= int(node) < workers


def _shortened(members: list[int]) -> str:
    if len(members) <= NUM_MEMBERS_SHOWN:
        return "{" + ", ".join(map(str, members)) + "}"
    shown = ", ".join(map(str, members[: NUM_MEMBERS_SHOWN - 2]))
    return "{" + f"{shown}, … {len(members) - NUM_MEMBERS_SHOWN + 2} more" + "}"
