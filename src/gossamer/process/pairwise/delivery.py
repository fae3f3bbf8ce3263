"""Compares the exchanges that a method asks for (``Pair(rate)``) with those that take place, and says so if few do.

Half of a worker's exchanges are its own offers. The other half depends on its neighbours, which may be slow or done: it
is no shortage if all own offers lead to exchanges.
"""

from __future__ import annotations

import math
import threading
import time

from gossamer.process.events import EventKind, Events

MIN_STEPS, MIN_WINDOW_S = 50, 5.0
"""Exchanges are compared over windows of at least this many steps and seconds, and at the end over the whole run."""

MIN_ASKED = 20
"""Of fewer exchanges, half may be missing by chance."""


class DeliveryWatch:
    def __init__(self, events: Events) -> None:
        self._events = events
        self._rate = 0.0
        self._steps = 0
        """Steps with a neighbour alive."""
        self._last_step = 0
        self.num_merged = self.num_own_merged = 0
        """Exchanges that took place, and those of them that this worker offered."""
        self._mark = (0, 0, 0)
        self._mark_at = time.monotonic()
        self._said = False
        self._lock = threading.Lock()

    def asked(self, rate: float) -> None:
        """The method asks for exchanges at this rate. An infinite one asks for no certain number."""
        self._rate = rate if math.isfinite(rate) else 0.0

    def merged(self, offered: bool) -> None:
        self.num_merged += 1
        self.num_own_merged += int(offered)

    def poll(self, step: int, company: bool, ended: bool = False) -> None:
        """``step``: of this worker; ``company``: whether a neighbour is alive. Any thread may call it."""
        with self._lock:
            if company:
                self._steps += step - self._last_step
            self._last_step = step
            if self._rate and not self._said:
                self._check(ended)

    def _check(self, ended: bool) -> None:
        counts, now = (self._steps, self.num_merged, self.num_own_merged), time.monotonic()
        if ended:
            self._compare(counts)
        elif self._steps - self._mark[0] >= MIN_STEPS and now - self._mark_at >= MIN_WINDOW_S:
            self._compare(tuple(count - mark for count, mark in zip(counts, self._mark, strict=True)))
            self._mark, self._mark_at = counts, now

    def _compare(self, counts: tuple[int, ...]) -> None:
        steps, merged, own_merged = counts
        asked = self._rate * steps
        if asked >= MIN_ASKED and merged < asked / 2 and own_merged < asked / 4:
            self._said = True
            text = (
                f"only {merged} of about {asked:.0f} exchanges took place in {steps} steps (rate {self._rate:g}): "
                "make steps longer (larger mini-batches), take a topology with fewer neighbours, a smaller wire "
                "(wire='bfloat16'), or a lower rate"
            )
            self._events.add(EventKind.FEW_EXCHANGES, text)
