"""Pairing: which two neighbours exchange next, and when.

On the ideal clock, every edge of the topology fires as a Poisson process of its own. On the hardware clock, each
worker becomes ready at random moments, on average ``rate`` times per gradient, and pairs with the neighbour that has
been ready longest. A worker that finds no ready neighbour stays ready until a neighbour finds it, and goes on training.
A rate of infinity means: ready at once, on both clocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gossamer.errors import MethodError
from gossamer.topology import Topology
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue
from gossamer.virtual.sim.virtual_worker import Coroutine

OnPair = Callable[[Coroutine, Coroutine], None]
"""Called with the coroutines of two neighbours that are to exchange."""

MAX_BACKLOG = 2.0
"""Exchanges that a worker may catch up on after a time without a ready neighbour."""


class PoissonEdges:
    """Edges that fire as independent Poisson processes of rates λ_ij, drawn in blocks."""

    BLOCK = 4096

    def __init__(self, topology: Topology, rate: float, rng: np.random.Generator) -> None:
        self.edges = topology.edges
        rates = topology.rates(rate)
        self.total_rate = float(rates.sum())
        self.cumulative = np.cumsum(rates) / self.total_rate if self.total_rate else rates
        self.rng = rng
        self._gaps: list[float] = []
        self._edges: list[list[int]] = []

    def draw(self) -> tuple[float, int, int]:
        """Return the time until the next edge fires, and its two workers."""
        if not self._gaps:
            self._gaps = (self.rng.standard_exponential(self.BLOCK) / self.total_rate).tolist()
            chosen = np.searchsorted(self.cumulative, self.rng.random(self.BLOCK), side="right")
            self._edges = self.edges[np.minimum(chosen, len(self.edges) - 1)].tolist()
        a, b = self._edges.pop()
        return self._gaps.pop(), a, b


class PoissonPairing:
    """Pairs the two workers of an edge whenever the edge fires and both wait for a peer."""

    def __init__(self, topology: Topology, queue: EventQueue, on_pair: OnPair, rng: np.random.Generator) -> None:
        self.topology, self.queue, self.on_pair, self.rng = topology, queue, on_pair, rng
        self.waiting: dict[int, Coroutine] = {}
        self.rate = 0.0
        self.edges: PoissonEdges | None = None
        self.at_once = ReadyPairing(topology, queue, on_pair)
        """For requests of an infinite rate."""
        self.stopped = False

    def stop(self) -> None:
        """Make no more pairs."""
        self.stopped = self.at_once.stopped = True

    def request(self, now: float, coroutine: Coroutine, rate: float) -> None:
        """Find a peer for this worker, at ``rate`` exchanges per gradient."""
        if rate == math.inf:
            self.at_once.request(now, coroutine, rate)
            return
        if rate != self.rate:
            self._begin(now, coroutine, rate)
        self.waiting[coroutine.worker.rank] = coroutine

    def remove(self, rank: int) -> None:
        """Drop the request of this worker."""
        self.waiting.pop(rank, None)
        self.at_once.remove(rank)

    def _begin(self, now: float, coroutine: Coroutine, rate: float) -> None:
        if self.rate:
            raise MethodError(
                f"worker {coroutine.worker.rank} yielded Pair(rate={rate:g}) after Pair(rate={self.rate:g}): on the "
                "ideal clock all workers have one rate; use --clock hardware"
            )
        self.rate = rate
        if self.topology.num_edges:
            self.edges = PoissonEdges(self.topology, rate, self.rng)
            self._schedule(now)

    def _schedule(self, now: float) -> None:
        assert self.edges is not None
        gap, a, b = self.edges.draw()
        self.queue.schedule(now + gap, MESSAGE, self._fire, a, b)

    def _fire(self, now: float, a: int, b: int) -> None:
        if self.stopped:
            return
        self._schedule(now)
        if a in self.waiting and b in self.waiting:
            self.on_pair(self.waiting.pop(a), self.waiting.pop(b))


class _EndlessPairing:
    """Refuses a worker that pairs at an infinite rate again and again while no time passes: time would stand still."""

    MAX_PAIRS = 1000

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, int]] = {}

    def check(self, now: float, rank: int) -> None:
        since, count = self._counts.get(rank, (now, 0))
        count = count + 1 if since == now else 1
        self._counts[rank] = (now, count)
        if count > self.MAX_PAIRS:
            raise MethodError(
                f"worker {rank} yielded Pair(rate=inf) {count} times while no time passed: expected WaitSteps between "
                "two exchanges, or a finite rate"
            )


class ReadyPairing:
    """Pairs workers that become ready at their own pace."""

    def __init__(self, topology: Topology, queue: EventQueue, on_pair: OnPair) -> None:
        self.topology, self.queue, self.on_pair = topology, queue, on_pair
        self.waiting: dict[int, tuple[int, Coroutine]] = {}
        """Ready workers with the sequence number of their wait, the longest-waiting first."""
        self.due: dict[int, float] = {}
        """When each worker became, or becomes, ready for its latest exchange."""
        self._num_waits = 0
        self._endless = _EndlessPairing()
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self._complete = topology.num_edges == topology.workers * (topology.workers - 1) // 2
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True

    def request(self, now: float, coroutine: Coroutine, rate: float) -> None:
        worker = coroutine.worker
        rank, mean_gap = worker.rank, worker.mean_gradient_time / rate
        if not mean_gap:
            self._endless.check(now, rank)
        due = self.due.get(rank, now) + mean_gap * next(worker.pairing_gaps)
        due = max(due, now - MAX_BACKLOG * mean_gap)
        self.due[rank] = due
        self.queue.schedule(due if due > now else now, MESSAGE, self._ready, coroutine)

    def remove(self, rank: int) -> None:
        self.waiting.pop(rank, None)
        self.due.pop(rank, None)

    def _ready(self, now: float, coroutine: Coroutine) -> None:
        if coroutine.ended or self.stopped:
            return
        rank = coroutine.worker.rank
        peer = self._find_peer(rank)
        if peer is None:
            self._num_waits += 1
            self.waiting[rank] = (self._num_waits, coroutine)
        else:
            del self.waiting[peer.worker.rank]
            self.on_pair(peer, coroutine)

    def _find_peer(self, rank: int) -> Coroutine | None:
        """Return the ready neighbour that has waited longest."""
        if self._complete:
            longest = next(iter(self.waiting.values()), None)
            return None if longest is None else longest[1]
        neighbours = self._neighbours.get(rank)
        if neighbours is None:
            neighbours = self._neighbours[rank] = tuple(self.topology.neighbours(rank))
        waiting, peer, since = self.waiting, None, self._num_waits + 1
        for neighbour in neighbours:
            ready = waiting.get(neighbour)
            if ready is not None and ready[0] < since:
                since, peer = ready
        return peer
