"""A network in which messages take time: flows that share network interfaces (NICs).

The NIC of a node carries ``link`` bytes per second in each direction and shares them equally among its flows. A flow
runs at the rate of its most crowded NIC. Inside a node each worker has a NIC of its own.

A ring all-reduce over m workers sends 2(m−1)/m of the vector through every NIC and takes 2(m−1) latencies. A ring
all-gather sends m−1 messages and takes m−1 latencies. Workers of one node are neighbours in the ring, so it passes
through each node's NIC once. These flows load both directions of a NIC. A message of one worker to another loads one
direction at each end.

If workers are replicas of K ranks, all K links between two of them carry their part at once. Between nodes they share
the NICs of the nodes, as one flow of all parts; inside a node each has NICs of its own, as one flow of one part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from gossamer.hardware import NodeLayout
from gossamer.replica_time import ReplicaShape
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue


class Flow:
    """One transfer in flight: ``bytes_left`` at time ``since``, running at ``rate`` bytes per second.

    ``version`` goes up with every change of the rate. The event that ends a flow is stale if its version is older.
    """

    __slots__ = ("bytes_left", "done", "latency", "max_rate", "nics", "rate", "since", "version")

    def __init__(self, nics: tuple[int, ...], size_bytes: float, max_rate: float, latency: float, done: Any) -> None:
        self.nics, self.bytes_left, self.max_rate, self.latency, self.done = nics, size_bytes, max_rate, latency, done
        self.rate, self.since, self.version = 0.0, 0.0, 0


class Network:
    """The NICs of all nodes and workers, and the flows that share them. Calls ``done(time)`` when a transfer ends."""

    def __init__(
        self, layout: NodeLayout, num_workers: int, queue: EventQueue, replica: ReplicaShape | None = None
    ) -> None:
        self.layout, self.queue = layout, queue
        # The ranks of two replicas use a link each, all at once: between nodes these share the nodes' NICs.
        self._num_links = 1 if replica is None else replica.ranks
        self._part = 1.0 if replica is None else replica.part
        # The NICs of nodes first, then those of workers inside their node.
        self.capacity = [layout.between.bytes_per_s] * layout.num_nodes + [layout.inside.bytes_per_s] * num_workers
        self.num_nics = len(self.capacity)
        self.flows: list[dict[Flow, None]] = [{} for _ in range(3 * self.num_nics)]
        """The flows of each NIC: in both directions; then, for each NIC again, only out of it; then only into it.
        Dictionaries, so that their order is fixed."""
        self._has_one_way_flows = False
        self._routes: dict[tuple[int, int], tuple[tuple[int, ...], float, float]] = {}
        """NICs, bandwidth and latency between two workers."""

    def swap(self, now: float, a: int, b: int, size_bytes: float, done: Callable[[float], None]) -> None:
        """Send ``size_bytes`` in both directions between two workers."""
        route = self._routes.get((a, b))
        if route is None:
            link = self.layout.link(a, b)
            route = self._routes[a, b] = (self._nics((a, b)), link.bytes_per_s, link.latency_s)
        nics, max_rate, latency = route
        self._start(now, Flow(nics, self._flow_bytes(nics, size_bytes), max_rate, latency, done))

    def shift(self, now: float, source: int, to: int, size_bytes: float, done: Callable[[float], None]) -> None:
        """Send ``size_bytes`` from one worker to another."""
        self._has_one_way_flows = True
        link, nics = self.layout.link(source, to), (self.layout.node(source), self.layout.node(to))
        if nics[0] == nics[1]:
            nics = (self.layout.num_nodes + source, self.layout.num_nodes + to)
            sent_bytes = self._part * size_bytes
        else:
            sent_bytes = self._num_links * self._part * size_bytes
        nics = (self.num_nics + nics[0], 2 * self.num_nics + nics[1])
        self._start(now, Flow(nics, sent_bytes, link.bytes_per_s, link.latency_s, done))

    def mean(self, now: float, members: tuple[int, ...], size_bytes: float, done: Callable[[float], None]) -> None:
        rounds = 2 * (len(members) - 1)
        self._collective(now, members, rounds, rounds / len(members) * size_bytes, done)

    def gather(self, now: float, members: tuple[int, ...], size_bytes: float, done: Callable[[float], None]) -> None:
        rounds = len(members) - 1
        self._collective(now, members, rounds, rounds * size_bytes, done)

    def _collective(
        self, now: float, members: tuple[int, ...], rounds: int, size_bytes: float, done: Callable[[float], None]
    ) -> None:
        nics = self._nics(members)
        crosses = nics[0] < self.layout.num_nodes
        links = [self.layout.link(a, b) for a, b in zip(members, members[1:] + members[:1], strict=True)]
        # Links inside a node are as many as a worker has ranks; those between nodes share a NIC.
        inside = self._num_links if crosses else 1
        max_rate = min(link.bytes_per_s * (inside if link is self.layout.inside else 1) for link in links)
        latency = rounds * max(link.latency_s for link in links)
        self._start(now, Flow(nics, self._flow_bytes(nics, size_bytes), max_rate, latency, done))

    def _flow_bytes(self, nics: tuple[int, ...], size_bytes: float) -> float:
        """Return what goes through these NICs if workers send vectors of ``size_bytes``."""
        return self._part * size_bytes * (self._num_links if nics[0] < self.layout.num_nodes else 1)

    def _nics(self, members: tuple[int, ...]) -> tuple[int, ...]:
        nodes = {self.layout.node(rank) for rank in members}
        if len(nodes) > 1:
            return tuple(nodes)
        return tuple(self.layout.num_nodes + rank for rank in members)

    def _start(self, now: float, flow: Flow) -> None:
        flow.since = now
        others = self._sharing(flow)
        for nic in flow.nics:
            self.flows[nic][flow] = None
        self._set_rates(now, (*others, flow))

    def _finish(self, now: float, flow: Flow, version: int) -> None:
        if flow.version != version:
            return
        for nic in flow.nics:
            del self.flows[nic][flow]
        others = self._sharing(flow)
        if others:
            self._set_rates(now, others)
        self.queue.schedule(now + flow.latency, MESSAGE, flow.done)

    def _sharing(self, flow: Flow) -> Iterable[Flow]:
        """Return all flows on the NICs of ``flow``, in a fixed order."""
        nics = flow.nics
        if self._has_one_way_flows:
            nics = tuple(beside for nic in nics for beside in self._sharing_nics(nic))
        for nic in nics:
            if self.flows[nic]:
                return dict.fromkeys(itertools.chain.from_iterable(self.flows[nic] for nic in nics))
        return ()

    def _sharing_nics(self, nic: int) -> tuple[int, ...]:
        """Return where the flows are that share a direction with those of ``nic`` (an index into ``flows``)."""
        if nic >= self.num_nics:
            return nic, nic % self.num_nics
        return nic, self.num_nics + nic, 2 * self.num_nics + nic

    def _num_sharing(self, nic: int) -> int:
        """Return how many flows share the bandwidth of ``nic``, in its more crowded direction."""
        first, *others = self._sharing_nics(nic)
        return len(self.flows[first]) + max(len(self.flows[other]) for other in others)

    def _set_rates(self, now: float, flows: Iterable[Flow]) -> None:
        """Give each flow its share of its NICs from now on, and schedule its end anew if the share has changed."""
        capacity, flows_of, num_nics = self.capacity, self.flows, self.num_nics
        one_way = self._has_one_way_flows
        for flow in flows:
            rate = flow.max_rate
            for nic in flow.nics:
                if one_way:
                    share = capacity[nic % num_nics] / self._num_sharing(nic)
                else:
                    share = capacity[nic] / len(flows_of[nic])
                if share < rate:
                    rate = share
            if rate == flow.rate:
                continue
            flow.bytes_left = max(0.0, flow.bytes_left - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            flow.version += 1
            seconds_left = 0.0 if math.isinf(rate) else flow.bytes_left / rate
            self.queue.schedule(now + seconds_left, MESSAGE, self._finish, flow, flow.version)
