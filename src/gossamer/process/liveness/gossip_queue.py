"""What a worker tells its neighbours: what is new about others, and of many workers a part in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

MAX_RECORDS = 16
"""In one message, besides the sender's own."""

MAX_COUNTERS = 256
"""In one message: the heartbeats of workers whose records are not in it."""

MAX_PUSHES = 20
"""How often in a tick news are passed on at once. What comes after waits for the next tick, and travels together."""

MAX_PUSHED_RECORDS = 64
"""The same for messages with the records of all, in records: when many workers join, each of them is news to all."""


class GossipQueue:
    """The records, counters and deaths that wait to be told to the neighbours."""

    def __init__(self, others: Iterable[int], max_records: int = MAX_RECORDS) -> None:
        self.max_records = max_records
        self._others = deque(others)
        """Whose records are passed on next come first."""
        self._counted = deque(self._others)
        """The same of heartbeats."""
        self._changed: dict[int, None] = {}
        """Whose records have changed since they were passed on."""
        self._ranks: dict[int, None] = {}
        self._found_dead: dict[tuple[int, int], None] = {}
        self._num_pushes = 0

    def come(self, rank: int) -> None:
        self._others.append(rank)
        self._counted.append(rank)

    def go(self, rank: int) -> None:
        self._others.remove(rank)
        self._counted.remove(rank)
        self._changed.pop(rank, None)
        self._ranks.pop(rank, None)

    def note_change(self, rank: int) -> None:
        """A record has changed; it is the next to be passed on, with the next gossip."""
        self._changed[rank] = None

    def note(self, ranks: Iterable[int]) -> None:
        """There is something new about these workers."""
        self._ranks.update(dict.fromkeys(ranks))

    def note_dead(self, rank: int, process: int) -> None:
        """Somebody has found this process dead. Its record goes with that: it shows how far its counter has come."""
        self._found_dead[rank, process] = None
        self.note([rank])

    def begin_tick(self) -> bool:
        """Return whether something has waited for it."""
        self._num_pushes = 0
        return bool(self._ranks or self._found_dead)

    def take(self) -> tuple[list[int], tuple[tuple[int, int], ...]] | None:
        """Return about whom there is news and who was found dead; ``None`` if that has to wait for the next tick."""
        self._num_pushes += 1
        most = max(1, MAX_PUSHED_RECORDS // (len(self._others) + 1)) if self.fits_all else MAX_PUSHES
        if self._num_pushes > most:
            return None
        taken = list(self._ranks), tuple(self._found_dead)
        self._ranks, self._found_dead = {}, {}
        return taken

    @property
    def fits_all(self) -> bool:
        """Whether one message holds the records of all."""
        return len(self._others) <= self.max_records

    @property
    def counts_all(self) -> bool:
        """Whether one message holds the heartbeats of all."""
        return len(self._others) <= self.max_records + MAX_COUNTERS

    def next_records(self) -> list[int]:
        """Return whose records go with the next gossip: first of all those that have changed."""
        changed = list(islice(self._changed, self.max_records))
        for rank in changed:
            del self._changed[rank]
        free = self.max_records - len(changed)
        in_turn = list(islice(self._others, free))
        self._others.rotate(-free)
        return list(dict.fromkeys(changed + in_turn))

    def next_counters(self) -> list[int]:
        """Return whose heartbeats go with the next gossip."""
        ranks = list(islice(self._counted, self.max_records + MAX_COUNTERS))
        self._counted.rotate(-len(ranks))
        return ranks
