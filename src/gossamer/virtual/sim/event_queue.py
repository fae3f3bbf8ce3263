"""The event queue of the simulation."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

# At one moment, messages arrive first, then gradients end, then gradients begin: a message that takes no time is merged
# before the next gradient reads the parameters.
MESSAGE, GRADIENT_END, GRADIENT_BEGIN, OBSERVE = range(4)


Event = tuple[float, int, int, Callable[..., None], tuple[Any, ...]]
"""Time, kind, sequence number; the action and its arguments."""


class EventQueue:
    """Runs actions in the order of their time, then of their kind, then of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._first: Event | None = None
        """The next event, if it is not in the heap: an event that is due at once need not pass through the heap."""
        self._heap: list[Event] = []
        self._num_scheduled = 0

    def schedule(self, time: float, kind: int, action: Callable[..., None], *arguments: Any) -> None:
        """Call ``action(time, *arguments)`` at ``time``."""
        self._num_scheduled += 1
        event, first = (time, kind, self._num_scheduled, action, arguments), self._first
        if first is None:
            if not self._heap or event < self._heap[0]:
                self._first = event
                return
        elif event < first:
            self._first, event = event, first
        heapq.heappush(self._heap, event)

    def settled(self, last_kind: int = GRADIENT_END) -> bool:
        """Whether no event up to ``last_kind`` (by default no message and no end of a gradient) is due now."""
        event = self._first or (self._heap[0] if self._heap else None)
        return event is None or event[0] > self.now or event[1] > last_kind

    def run_next(self) -> bool:
        """Run the next event. Return False if the queue is empty."""
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
