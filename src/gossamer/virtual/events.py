"""Simulated time: what happens next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

# At one instant messages arrive before gradients end, and gradients start only after both: a message that takes no
# time is merged before the next gradient looks at the parameters.
ARRIVE, END, BEGIN, LOOK = range(4)


class Events:
    """An event queue: actions in the order of their time, then of their kind, then of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, time: float, kind: int, action: Callable[..., None], *arguments: Any) -> None:
        """Call ``action(time, *arguments)`` when its time has come."""
        self._made += 1
        heapq.heappush(self._heap, (time, kind, self._made, action, arguments))

    def settled(self) -> bool:
        """Whether no message arrives and no gradient ends at this instant any more."""
        return not self._heap or self._heap[0][0] > self.now or self._heap[0][1] > END

    def next(self) -> bool:
        """Let the next thing happen; False if there is nothing more."""
        if not self._heap:
            return False
        self.now, _, _, action, arguments = heapq.heappop(self._heap)
        action(self.now, *arguments)
        return True
