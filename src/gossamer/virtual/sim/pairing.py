"""Who exchanges with whom.

On the ideal clock an edge's own Poisson process says so. On the hardware clock each worker becomes ready at moments
drawn with exponential gaps, ``rate`` per gradient of its own on average, and pairs with a neighbour that is ready too:
the one that has waited longest. A worker that finds nobody waits to be found and goes on training.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gossamer.topology import Topology
from gossamer.virtual.sim.clock import Edges
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue
from gossamer.virtual.sim.virtual_worker import Coroutine

Meet = Callable[[Coroutine, Coroutine], None]

MAX_ARREARS = 2.0
"""SimulatedExchanges a worker may catch up on after it found no partner for a while."""


class PoissonPairing:
    """Edges that fire by themselves."""

    def __init__(self, topology: Topology, queue: EventQueue, meet: Meet, rng: np.random.Generator) -> None:
        self.topology, self.queue, self.meet, self.rng = topology, queue, meet, rng
        self.generator: dict[int, Coroutine] = {}
        self.edges: Edges | None = None
        self.stopped = False

    def stop(self) -> None:
        """No more exchanges."""
        self.stopped = True

    def ask(self, now: float, coroutine: Coroutine, rate: float) -> None:
        self.generator[coroutine.worker.rank] = coroutine
        if self.edges is None and self.topology.num_edges:
            self.edges = Edges(self.topology, rate, self.rng)
            self._schedule(now)

    def forget(self, rank: int) -> None:
        self.generator.pop(rank, None)

    def _schedule(self, now: float) -> None:
        assert self.edges is not None
        gap, a, b = self.edges.draw()
        self.queue.schedule(now + gap, MESSAGE, self._spike, a, b)

    def _spike(self, now: float, a: int, b: int) -> None:
        if self.stopped:
            return
        self._schedule(now)
        if a in self.generator and b in self.generator:
            self.meet(self.generator.pop(a), self.generator.pop(b))


class ReadyPairing:
    """Workers that become ready at their own pace."""

    def __init__(self, topology: Topology, queue: EventQueue, meet: Meet) -> None:
        self.topology, self.queue, self.meet = topology, queue, meet
        self.waiting: dict[int, tuple[int, Coroutine]] = {}
        """Ready workers with the number of their wait, the longest-waiting first."""
        self.due: dict[int, float] = {}
        self._num_waits = 0
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self._complete = topology.num_edges == topology.workers * (topology.workers - 1) // 2
        self.stopped = False

    def stop(self) -> None:
        """No more exchanges."""
        self.stopped = True

    def ask(self, now: float, coroutine: Coroutine, rate: float) -> None:
        worker = coroutine.worker
        rank, unit = worker.rank, worker.mean_gradient_time / rate
        due = self.due.get(rank, now) + unit * next(worker.pairing_gaps)
        due = max(due, now - MAX_ARREARS * unit)
        self.due[rank] = due
        self.queue.schedule(due if due > now else now, MESSAGE, self._ready, coroutine)

    def forget(self, rank: int) -> None:
        self.waiting.pop(rank, None)
        self.due.pop(rank, None)

    def _ready(self, now: float, coroutine: Coroutine) -> None:
        if coroutine.over or self.stopped:
            return
        rank = coroutine.worker.rank
        partner = self._partner(rank)
        if partner is None:
            self._num_waits += 1
            self.waiting[rank] = (self._num_waits, coroutine)
        else:
            del self.waiting[partner.worker.rank]
            self.meet(partner, coroutine)

    def _partner(self, rank: int) -> Coroutine | None:
        """The neighbour that has waited longest."""
        if self._complete:
            longest = next(iter(self.waiting.values()), None)
            return None if longest is None else longest[1]
        neighbours = self._neighbours.get(rank)
        if neighbours is None:
            neighbours = self._neighbours[rank] = tuple(self.topology.neighbours(rank))
        waiting, found, since = self.waiting, None, self._num_waits + 1
        for other in neighbours:
            ready = waiting.get(other)
            if ready is not None and ready[0] < since:
                since, found = ready
        return found
