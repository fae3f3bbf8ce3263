"""What a worker has to tell its neighbours: what is new about others, and in a large run a part of all in turn."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

MAX_RECORDS = 16
"""In one message, besides the sender's own. Of more workers than these, each message holds a part."""

MAX_PUSHES = 20
"""How often in a tick news are passed on at once. What comes after waits for the next tick, and travels together."""

MAX_PUSHED_RECORDS = 64
"""The same for messages with the records of all, in records: when many workers join, each of them is news to all."""


class News:
    def __init__(self, others: Iterable[int]) -> None:
        self._others = deque(others)
        """Whose records are passed on next come first."""
        self._ranks: dict[int, None] = {}
        self._found_dead: dict[tuple[int, int], None] = {}
        self._num_pushes = 0

    def come(self, rank: int) -> None:
        self._others.append(rank)

    def go(self, rank: int) -> None:
        self._others.remove(rank)
        self._ranks.pop(rank, None)

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
        return len(self._others) <= MAX_RECORDS

    def next_in_turn(self) -> list[int]:
        ranks = list(itertools.islice(self._others, MAX_RECORDS))
        self._others.rotate(-MAX_RECORDS)
        return ranks
