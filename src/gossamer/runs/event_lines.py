"""The events of all workers as lines for one screen: what several say about another worker is said once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

from gossamer.process.watches.peer_watch import death_text, return_text

ABOUT_ANOTHER = re.compile(r"worker \d+ ")
"""How events about another worker begin. Their texts are the same on all workers."""


class EventLines:
    def __init__(self) -> None:
        self._num_read: Counter[int] = Counter()
        self._said_by: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._seen_here: Counter[str] = Counter()
        """What the supervisor saw itself, and says in its own words."""
        self._said: Counter[str] = Counter()
        """How often each event about another worker was said."""

    def read(self, rank: int, events: list[str]) -> list[str]:
        """Return the lines for what is new in the list of events of worker ``rank``."""
        if len(events) < self._num_read[rank]:
            # A worker that was restarted begins a new list.
            self._num_read[rank] = 0
            self._said_by[rank].clear()
        lines = []
        for event in events[self._num_read[rank] :]:
            if not ABOUT_ANOTHER.match(event):
                lines.append(f"worker {rank}: {event}")
            elif self._is_new(self._said_by[rank], event):
                lines.append(event)
        self._num_read[rank] = len(events)
        return lines

    def saw_death(self, rank: int) -> None:
        self._is_new(self._seen_here, death_text(rank))

    def saw_return(self, rank: int) -> None:
        self._is_new(self._seen_here, return_text(rank))

    def _is_new(self, said_by_one: Counter[str], event: str) -> bool:
        """Return whether one observer has seen an event more often than it was said."""
        said_by_one[event] += 1
        new = said_by_one[event] > self._said[event]
        self._said[event] = max(self._said[event], said_by_one[event])
        return new
