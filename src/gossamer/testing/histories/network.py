"""A simulated network that loses, delays and reorders messages, and whose links are cut one way or both."""

from __future__ import annotations

import random
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkQuality:
    min_delay_s: float = 0.0005
    max_delay_s: float = 0.005
    loss: float = 0.0
    duplicates: float = 0.0
    """The share of messages that come twice."""


class EventQueue:
    """Events in order of time; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._times: list[float] = []
        """Sorted, negative: the next event is at the end. Faster than a heap, as not many wait at a time."""
        self._events: dict[float, list[Callable[[], None]]] = {}

    def at(self, time: float, event: Callable[[], None]) -> None:
        time = max(time, self.now)
        events = self._events.get(time)
        if events is None:
            self._events[time] = [event]
            insort(self._times, -time)
        else:
            events.append(event)

    def run_until(self, time: float) -> None:
        times = self._times
        while times and -times[-1] <= time:
            self.now = -times[-1]
            # An event may add others for the same time.
            for event in self._events[self.now]:
                event()
            del self._events[-times.pop()]
        self.now = time


class Network:
    """Which links work. ``down``: pairs (from, to)."""

    def __init__(self, workers: int, quality: LinkQuality, rng: random.Random, queue: EventQueue) -> None:
        self.workers, self.quality, self._rng, self._queue = workers, quality, rng, queue
        self.down: set[tuple[int, int]] = set()
        self.one_way_until = 0.0
        """So long a link of which only one way was cut still carries messages the other way."""
        self._still_carries: dict[tuple[int, int], float] = {}
        self.num_messages = self.num_bytes = self.most_bytes = 0
        self.sizes = False
        """Whether to count bytes: to encode each message takes longer than all the rest."""
        self.received: Counter[int] = Counter()

    def count(self, size_bytes: int) -> None:
        """Note the size of a message that is sent."""
        self.num_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, size_bytes)

    def send(self, sender: int, receiver: int, deliver: Callable[[], None]) -> None:
        self.num_messages += 1
        if self.sizes:
            self.received[receiver] += 1
        quality, rng = self.quality, self._rng
        down = (sender, receiver) in self.down and self._still_carries.get((sender, receiver), 0.0) <= self._queue.now
        if down or (quality.loss and rng.random() < quality.loss):
            return
        spread_s = quality.max_delay_s - quality.min_delay_s
        self._queue.at(self._queue.now + quality.min_delay_s + spread_s * rng.random() ** 2, deliver)
        if quality.duplicates and rng.random() < quality.duplicates:
            self._queue.at(self._queue.now + quality.min_delay_s + 2 * spread_s * rng.random(), deliver)

    def cut(self, one: int, other: int, one_way_s: float = 0.0) -> None:
        """Cut a link. If only one way, answers are missing, so soon nothing gets through the other way either.

        ``one_way_s``: so long messages from ``one`` to ``other`` still arrive.
        """
        self.down |= {(one, other), (other, one)}
        until = self._queue.now + one_way_s
        self._still_carries[one, other], self._still_carries[other, one] = until, 0.0
        self.one_way_until = max(self.one_way_until, until)

    def separate(self, side: set[int]) -> None:
        """Cut all links between ``side`` and the rest."""
        for one in side:
            for other in range(self.workers):
                if other not in side:
                    self.cut(one, other)

    def heal(self) -> None:
        self.down.clear()
        self._still_carries.clear()
        self.one_way_until = 0.0

    def reachable(self, start: int, ranks: set[int]) -> set[int]:
        """Return those of ``ranks`` whose messages get to ``start``, directly or passed on by others of them."""
        if not self.down:
            return ranks | {start}
        reached, todo = {start}, [start]
        while todo:
            receiver = todo.pop()
            for sender in ranks - reached:
                if (sender, receiver) not in self.down:
                    reached.add(sender)
                    todo.append(sender)
        return reached
