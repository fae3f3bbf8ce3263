"""Simulated time: what happens next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

# At one instant messages arrive before gradients end, and gradients start only after both: a message that takes no
# time is merged before the next gradient looks at the parameters.
MESSAGE, GRADIENT_END, GRADIENT_BEGIN, OBSERVE = range(4)


Event = tuple[float, int, int, Callable[..., None], tuple[Any, ...]]
"""Time, kind, number; the action and its arguments."""


class EventQueue:
    """An event queue: actions in the order of their time, then of their kind, then of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._first: Event | None = None
        """The next one, if it is not in the heap: what happens at once need not go through that."""
        self._heap: list[Event] = []
        self._made = 0

    def schedule(self, time: float, kind: int, action: Callable[..., None], *arguments: Any) -> None:
        """Call ``action(time, *arguments)`` when its time has come."""
        self._made += 1
        event, first = (time, kind, self._made, action, arguments), self._first
        if first is None:
            if not self._heap or event < self._heap[0]:
                self._first = event
                return
        elif event < first:
            self._first, event = event, first
        heapq.heappush(self._heap, event)

    def settled(self, last: int = GRADIENT_END) -> bool:
        """Whether nothing up to this kind happens at this instant any more: no message arrives and no gradient ends."""
        event = self._first or (self._heap[0] if self._heap else None)
        return event is None or event[0] > self.now or event[1] > last

    def run_next(self) -> bool:
        """Let the next thing happen; False if there is nothing more."""
        event = self._first
        if event is not None:
            self._first = None
        elif self._heap:
            event = heapq.heappop(self._heap)
        else:
            return False
        self.now, _, _, action, arguments = event
        action(self.now, *arguments)
        return True
