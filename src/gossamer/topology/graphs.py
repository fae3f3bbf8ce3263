"""The named topologies: each is one function that turns a Request into a Topology, and one row of GRAPHS."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gossamer.errors import InputError
from gossamer.topology import schedules
from gossamer.topology.structures import CayleyGraph, EdgeGraph, from_networkx
from gossamer.topology.topology import Topology

if TYPE_CHECKING:
    import networkx as nx

NUM_SEEDS_TRIED = 100
DEFAULT_DEGREE = 4


@dataclass(frozen=True, kw_only=True)
class Request:
    """A user's request: the text as given, the option after its colon, and the validated numbers."""

    text: str
    option: str | None
    workers: int | None
    nodes: int | None
    seed: int

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]

    def num_workers(self) -> int:
        if self.workers is None:
            raise InputError(f"{self.name} needs a number of workers: give one, e.g. workers=16")
        return self.workers

    def no_option(self) -> None:
        if self.option is not None:
            raise InputError(f"{self.name} takes no option, but {self.text!r} has one: write {self.name!r}")

    def bad_option(self, expected: str, example: str) -> InputError:
        return InputError(f"cannot use the option in {self.text!r}: expected {expected}; write e.g. {example!r}")


@dataclass(frozen=True)
class Graph:
    make: Callable[[Request], Topology]
    description: str
    uses_nodes: bool = False
    """The graph depends on how many nodes the workers are on."""


def complete(request: Request) -> Topology:
    request.no_option()
    workers = request.num_workers()
    return Topology(
        request.text,
        structure=_complete_structure(workers),
        schedule=partial(schedules.everyone, workers),
        layout="circle",
    )


def ring(request: Request) -> Topology:
    request.no_option()
    return _torus(request.text, (request.num_workers(),), layout="circle")


def path(request: Request) -> Topology:
    request.no_option()
    ranks = np.arange(request.num_workers())
    return Topology(
        request.text,
        structure=EdgeGraph(len(ranks), np.stack([ranks[:-1], ranks[1:]], axis=-1)),
        layout="open-circle",
    )


def star(request: Request) -> Topology:
    request.no_option()
    ranks = np.arange(request.num_workers())
    edges = np.stack([np.zeros(len(ranks) - 1, dtype=np.int64), ranks[1:]], axis=-1)
    return Topology(request.text, structure=EdgeGraph(len(ranks), edges), layout="hub")


def torus(request: Request) -> Topology:
    if request.option is None:
        workers = request.num_workers()
        rows = next(a for a in range(math.isqrt(workers), 0, -1) if workers % a == 0)
        columns = workers // rows
    else:
        rows, columns = _rows_and_columns(request)
        workers = rows * columns
        if request.workers not in (None, workers):
            raise InputError(
                f"{request.text} has {rows} × {columns} = {workers} workers, not {request.workers}: "
                "change one of the two, or write 'torus' to have it chosen"
            )
    if workers == 1:
        return _torus(request.text, (1,), layout="circle")
    if rows == 1 or columns == 1:
        why = "" if request.option else f": {workers} is prime"
        return _torus(request.text, (workers,), layout="circle", note=f"a torus of 1 × {workers} is a ring{why}")
    return _torus(request.text, (rows, columns), layout="grid")


def hypercube(request: Request) -> Topology:
    request.no_option()
    workers = request.num_workers()
    if not _is_power_of_two(workers):
        below = 1 << (workers.bit_length() - 1)
        raise InputError(
            f"hypercube needs a power of two, not {workers} workers: "
            f"use {below} or {2 * below} workers, or 'exponential', which works for any number"
        )
    dimensions = workers.bit_length() - 1
    return _torus(request.text, (2,) * dimensions or (1,), layout="circle")


def exponential(request: Request) -> Topology:
    request.no_option()
    workers = request.num_workers()
    offsets = [1 << k for k in range(workers.bit_length()) if 1 << k < workers]
    structure = CayleyGraph((workers,), np.array(offsets, dtype=np.int64).reshape(-1, 1))
    return Topology(request.text, structure=structure, layout="circle")


def one_peer_exponential(request: Request) -> Topology:
    request.no_option()
    workers = request.num_workers()
    note = ""
    if not _is_power_of_two(workers):
        note = f"one-peer-exponential needs a power of two; base takes its place for {workers} workers"
    # For a power of two, Base-2 is this schedule: round k pairs i with i xor 2^k.
    schedule = partial(schedules.base, workers, 1)
    return Topology(request.text, workers=workers, schedule=schedule, note=note, layout="circle")


def alternating_exponential_ring(request: Request) -> Topology:
    request.no_option()
    workers = request.num_workers()
    nodes = request.nodes or workers
    if not _is_power_of_two(nodes):
        below = 1 << (nodes.bit_length() - 1)
        raise InputError(
            f"alternating-exponential-ring needs a power of two of nodes, not {nodes}: "
            f"use {below} or {2 * below} nodes, or 'base', which works for any number"
        )
    if workers % nodes:
        fewer = workers - workers % nodes
        counts = f"{fewer} or {fewer + nodes}" if fewer else f"{nodes}"
        raise InputError(
            f"alternating-exponential-ring needs the same number of workers on each node, but {workers} workers do not "
            f"divide by {nodes} nodes: use {counts} workers, or 'base', which works for any number"
        )
    schedule = partial(schedules.alternating_exponential_ring, nodes, workers // nodes)
    layout = f"clusters:{nodes}" if 1 < nodes < workers else "circle"
    return Topology(request.text, workers=workers, schedule=schedule, layout=layout)


def random_regular(request: Request) -> Topology:
    workers = request.num_workers()
    degree = DEFAULT_DEGREE if request.option is None else _whole(request.option)
    if degree is None or degree < 1:
        raise request.bad_option("the number of neighbours, from 1 up", "random-regular:4")
    if workers <= degree + 1:
        note = f"a random-regular graph of degree {degree} is complete for {workers} workers" if workers > 1 else ""
        # Its rounds stay pairs: a given degree does not ask for a mean of all workers.
        return Topology(request.text, structure=_complete_structure(workers), note=note, layout="circle")
    if workers * degree % 2:
        raise InputError(
            f"there is no graph of {workers} workers with {degree} neighbours each, as both are odd: "
            f"use random-regular:{degree + 1}, or {workers + 1} workers"
        )
    if degree == 1:
        raise InputError(
            f"random-regular:1 cannot join {workers} workers: each has one neighbour only; use random-regular:3 or more"
        )
    import networkx as nx

    draw = partial(nx.random_regular_graph, degree, workers)
    return Topology(request.text, structure=_connected(draw, request, "use a larger degree, or 'ring'"))


def erdos_renyi(request: Request) -> Topology:
    workers = request.num_workers()
    probability = min(1.0, 2 * math.log(workers) / workers)
    if request.option is not None:
        given = _real(request.option)
        if given is None or not 0 < given <= 1:
            raise request.bad_option("the probability of an edge, above 0 and up to 1", "erdos-renyi:0.3")
        probability = given
    advice = f"use a probability above ln(n)/n = {math.log(workers) / workers:.3g}, or 'random-regular'"
    import networkx as nx

    draw = partial(nx.fast_gnp_random_graph, workers, probability)
    return Topology(request.text, structure=_connected(draw, request, advice))


def base(request: Request) -> Topology:
    workers = request.num_workers()
    k = 1 if request.option is None else _whole(request.option)
    if k is None or k < 1:
        raise request.bad_option("k, one less than the largest group, from 1 up", "base:2")
    schedule = partial(schedules.base, workers, k)
    return Topology(request.text, workers=workers, schedule=schedule, layout="circle")


GRAPHS: dict[str, Graph] = {
    "complete": Graph(complete, "every pair of workers; a round is the mean of all"),
    "ring": Graph(ring, "each worker with the next and the previous one"),
    "path": Graph(path, "a ring without the edge that closes it"),
    "star": Graph(star, "every worker with worker 0"),
    "torus": Graph(torus, "a grid with wrap-around, as square as possible; torus:AxB sets its sides"),
    "hypercube": Graph(hypercube, "i with i xor 2^k; needs a power of two; exact consensus after log2 n rounds"),
    "exponential": Graph(exponential, "i with i ± 2^k; few hops and few neighbours for any number of workers"),
    "one-peer-exponential": Graph(
        one_peer_exponential, "one peer per round, i xor 2^k in round k; exact consensus after log2 n rounds"
    ),
    "alternating-exponential-ring": Graph(
        alternating_exponential_ring,
        "half of the nodes average in pairs while the others average inside; exact consensus after a period",
        uses_nodes=True,
    ),
    "random-regular": Graph(random_regular, "random, d neighbours each; random-regular:D sets d (default 4)"),
    "erdos-renyi": Graph(
        erdos_renyi, "random, each edge with probability p; erdos-renyi:P sets p (default 2 ln n / n)"
    ),
    "base": Graph(
        base, "exact consensus in finitely many rounds for any number; base:K averages K+1 at a time (default 1)"
    ),
}


def _torus(text: str, shape: tuple[int, ...], *, layout: str, note: str = "") -> Topology:
    structure = CayleyGraph(shape, np.eye(len(shape), dtype=np.int64))
    return Topology(text, structure=structure, schedule=partial(schedules.along_axes, shape), note=note, layout=layout)


def _complete_structure(workers: int) -> CayleyGraph:
    return CayleyGraph((workers,), np.arange(1, workers)[:, None])


def _connected(draw: Callable[..., nx.Graph], request: Request, advice: str) -> EdgeGraph:
    """Draw with one seed after the other until the graph is connected."""
    import networkx as nx

    for attempt in range(NUM_SEEDS_TRIED):
        graph = draw(seed=request.seed + attempt)
        if nx.is_connected(graph):
            return from_networkx(graph)
    raise InputError(
        f"{request.text} gave no connected graph of {request.workers} workers "
        f"with any of {NUM_SEEDS_TRIED} seeds: {advice}"
    )


def _rows_and_columns(request: Request) -> tuple[int, int]:
    sides = [_whole(side) for side in (request.option or "").lower().split("x")]
    if len(sides) != 2 or not sides[0] or not sides[1]:
        raise request.bad_option("two whole numbers from 1 up, rows x columns", "torus:4x4")
    return sides[0], sides[1]


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _real(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
