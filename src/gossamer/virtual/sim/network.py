"""Messages that take time: flows that share network cards.

A node's card carries ``link`` bytes per second each way, shared evenly by the flows that use it at the same time; a
flow moves at the pace of its most crowded card. Inside a node each worker has a port of its own. A ring all-reduce
over m workers puts 2(m−1)/m of the vector through every card in 2(m−1) latencies, a ring all-gather m−1 messages in
m−1 latencies; workers of one node sit side by side in the ring, so a card carries it once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

from gossamer.hardware import NodeLayout
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue


class Flow:
    """One transfer under way."""

    __slots__ = ("cap", "cards", "done", "latency", "left", "rate", "since", "version")

    def __init__(self, cards: tuple[int, ...], size_bytes: float, cap: float, latency: float, done: Any) -> None:
        self.cards, self.left, self.cap, self.latency, self.done = cards, size_bytes, cap, latency, done
        self.rate, self.since, self.version = 0.0, 0.0, 0


class Network:
    """The cards of all nodes and the flows that share them."""

    def __init__(self, layout: NodeLayout, num_workers: int, queue: EventQueue) -> None:
        self.layout, self.queue = layout, queue
        # Cards of nodes first, then the ports of workers.
        self.speed = [layout.between.bytes_per_s] * layout.num_nodes + [layout.inside.bytes_per_s] * num_workers
        self.users: list[dict[Flow, None]] = [{} for _ in self.speed]
        self._ways: dict[tuple[int, int], tuple[tuple[int, ...], float, float]] = {}
        """The cards, the speed and the latency between two workers."""

    def swap(self, now: float, a: int, b: int, size_bytes: float, done: Callable[[float], None]) -> None:
        """Both ways at once between two workers; calls ``done(time)`` in the end."""
        way = self._ways.get((a, b))
        if way is None:
            link = self.layout.link(a, b)
            way = self._ways[a, b] = (self._cards((a, b)), link.bytes_per_s, link.latency_s)
        cards, cap, latency = way
        self._start(now, Flow(cards, size_bytes, cap, latency, done))

    def mean(self, now: float, members: tuple[int, ...], size_bytes: float, done: Callable[[float], None]) -> None:
        """A ring all-reduce over ``members``."""
        rounds = 2 * (len(members) - 1)
        self._collective(now, members, rounds, rounds / len(members) * size_bytes, done)

    def gather(self, now: float, members: tuple[int, ...], size_bytes: float, done: Callable[[float], None]) -> None:
        """A ring all-gather over ``members``."""
        rounds = len(members) - 1
        self._collective(now, members, rounds, rounds * size_bytes, done)

    def _collective(
        self, now: float, members: tuple[int, ...], rounds: int, size_bytes: float, done: Callable[[float], None]
    ) -> None:
        links = [self.layout.link(a, b) for a, b in zip(members, members[1:] + members[:1], strict=True)]
        cap = min(link.bytes_per_s for link in links)
        latency = rounds * max(link.latency_s for link in links)
        self._start(now, Flow(self._cards(members), size_bytes, cap, latency, done))

    def _cards(self, members: tuple[int, ...]) -> tuple[int, ...]:
        nodes = {self.layout.node(rank) for rank in members}
        if len(nodes) > 1:
            return tuple(nodes)
        return tuple(self.layout.num_nodes + rank for rank in members)

    def _start(self, now: float, flow: Flow) -> None:
        flow.since = now
        others = self._sharing(flow)
        for card in flow.cards:
            self.users[card][flow] = None
        self._pace(now, (*others, flow))

    def _finish(self, now: float, flow: Flow, version: int) -> None:
        if flow.version != version:
            return
        for card in flow.cards:
            del self.users[card][flow]
        others = self._sharing(flow)
        if others:
            self._pace(now, others)
        self.queue.schedule(now + flow.latency, MESSAGE, flow.done)

    def _sharing(self, flow: Flow) -> Iterable[Flow]:
        """All that use the cards of this flow, in a fixed order."""
        for card in flow.cards:
            if self.users[card]:
                return dict.fromkeys(itertools.chain.from_iterable(self.users[each] for each in flow.cards))
        return ()

    def _pace(self, now: float, flows: Iterable[Flow]) -> None:
        """Give each flow its share of its cards from now on."""
        speed, users = self.speed, self.users
        for flow in flows:
            pace = flow.cap
            for card in flow.cards:
                share = speed[card] / len(users[card])
                if share < pace:
                    pace = share
            if pace == flow.rate:
                continue
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
            flow.since, flow.rate = now, pace
            flow.version += 1
            left_s = 0.0 if math.isinf(pace) else flow.left / pace
            self.queue.schedule(now + left_s, MESSAGE, self._finish, flow, flow.version)
