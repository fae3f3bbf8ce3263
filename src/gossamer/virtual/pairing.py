"""Who exchanges with whom.

On the ideal clock an edge's own Poisson process says so. On the hardware clock each worker becomes ready at moments
drawn with exponential gaps, ``rate`` per gradient of its own on average, and pairs with a neighbour that is ready too:
the one that has waited longest. A worker that finds nobody waits to be found and goes on training.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gossamer.seeds import Ahead, exponentials
from gossamer.topology import Topology
from gossamer.virtual.clock import Edges
from gossamer.virtual.events import ARRIVE, Events
from gossamer.virtual.worker import Strand

Meet = Callable[[Strand, Strand], None]

MAX_ARREARS = 2.0
"""Exchanges a worker may catch up on after it found no partner for a while."""


class SpikePairing:
    """Edges that fire by themselves."""

    def __init__(self, topology: Topology, events: Events, meet: Meet, rng: np.random.Generator) -> None:
        self.topology, self.events, self.meet, self.rng = topology, events, meet, rng
        self.asking: dict[int, Strand] = {}
        self.edges: Edges | None = None
        self.stopped = False

    def stop(self) -> None:
        """No more exchanges."""
        self.stopped = True

    def ask(self, now: float, strand: Strand, rate: float) -> None:
        self.asking[strand.worker.rank] = strand
        if self.edges is None and self.topology.num_edges:
            self.edges = Edges(self.topology, rate, self.rng)
            self._schedule(now)

    def forget(self, rank: int) -> None:
        self.asking.pop(rank, None)

    def _schedule(self, now: float) -> None:
        assert self.edges is not None
        gap, a, b = self.edges.draw()
        self.events.at(now + gap, ARRIVE, self._spike, a, b)

    def _spike(self, now: float, a: int, b: int) -> None:
        if self.stopped:
            return
        self._schedule(now)
        if a in self.asking and b in self.asking:
            self.meet(self.asking.pop(a), self.asking.pop(b))


class ReadyPairing:
    """Workers that become ready at their own pace."""

    def __init__(self, topology: Topology, events: Events, meet: Meet) -> None:
        self.topology, self.events, self.meet = topology, events, meet
        self.waiting: dict[int, Strand] = {}
        """Ready workers, the longest-waiting first."""
        self.due: dict[int, float] = {}
        self.gaps = Ahead(exponentials)
        self._since: dict[int, int] = {}
        self._num_waits = 0
        self._neighbours: dict[int, tuple[int, ...]] = {}
        self._complete = topology.num_edges == topology.workers * (topology.workers - 1) // 2
        self.stopped = False

    def stop(self) -> None:
        """No more exchanges."""
        self.stopped = True

    def ask(self, now: float, strand: Strand, rate: float) -> None:
        worker = strand.worker
        unit = worker.gradient_time / rate
        due = self.due.get(worker.rank, now) + unit * self.gaps.next(worker.rank, worker.pairing_rng)
        due = max(due, now - MAX_ARREARS * unit)
        self.due[worker.rank] = due
        self.events.at(max(due, now), ARRIVE, self._ready, strand)

    def forget(self, rank: int) -> None:
        self.waiting.pop(rank, None)
        self.due.pop(rank, None)

    def _ready(self, now: float, strand: Strand) -> None:
        if strand.over or self.stopped:
            return
        rank = strand.worker.rank
        found = self._partner(rank)
        if found is None:
            self.waiting[rank] = strand
            self._num_waits += 1
            self._since[rank] = self._num_waits
        else:
            self.meet(self.waiting.pop(found), strand)

    def _partner(self, rank: int) -> int | None:
        """The neighbour that has waited longest."""
        if self._complete:
            return next(iter(self.waiting), None)
        neighbours = self._neighbours.get(rank)
        if neighbours is None:
            neighbours = self._neighbours[rank] = tuple(self.topology.neighbours(rank))
        ready = [other for other in neighbours if other in self.waiting]
        return min(ready, key=self._since.__getitem__) if ready else None
