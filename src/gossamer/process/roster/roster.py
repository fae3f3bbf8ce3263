"""The roster of a run, as one worker knows it.

It only ever gains entries: ranks that came, ranks that left for good. A rank that has left is never given again. So two
workers that know different rosters need not agree which is newer: each takes over what the other knows, in any order,
and all end with the same one. The store has it for those that come later; workers also hear of it with the heartbeats.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from gossamer.process.store.parsing import read_json

MAX_RANKS = 1 << 16
"""A rank has two bytes in messages."""


class Roster(NamedTuple):
    """Who belongs to a run."""

    first: int
    """The number of workers with which the run began: ranks 0 … ``first`` − 1."""
    came: frozenset[int] = frozenset()
    """Ranks that were given later."""
    left: frozenset[int] = frozenset()
    """Ranks that have left for good."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*range(self.first), *self.came} - self.left))

    @property
    def largest(self) -> int:
        """The largest rank that was ever on it."""
        return max((self.first - 1, *self.came))

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.to_text().encode())

    def merged(self, other: Roster) -> Roster:
        return Roster(self.first, self.came | other.came, self.left | other.left)

    def to_text(self) -> str:
        return json.dumps({"first": self.first, "came": sorted(self.came), "left": sorted(self.left)})


def read_roster(value: bytes | None) -> Roster | None:
    """Return the roster that another process has published; None if it cannot be read."""
    try:
        entries = read_json(value)
        came, left = frozenset(entries["came"]), frozenset(entries["left"])
        ranks = [entries["first"] - 1, *came, *left]
        valid = all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks)
        return Roster(entries["first"], came, left) if valid else None
    except (KeyError, TypeError):
        return None


class KnownRoster(Collection[int]):
    """What this worker knows of the roster: a collection of ranks that changes. Iterating takes them as they are."""

    def __init__(self, roster: Roster) -> None:
        self.value = roster
        self.ranks = roster.ranks
        self.on_change: list[Callable[[Roster, Roster], None]] = []
        """Called with the rosters before and after a change, in the thread that learned of it; must not block."""
        self.refresh: Callable[[], None] = lambda: None
        """Reads what the store has."""
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def learn(self, other: Roster) -> None:
        """Take over what another worker knows."""
        with self._lock:
            before = self.value
            after = before.merged(other)
            if after == before:
                return
            self.value, self.ranks = after, after.ranks
            for callback in self.on_change:
                callback(before, after)

    def learn_came(self, ranks: Iterable[int]) -> None:
        """These workers belong to the run, or did."""
        self.learn(self.value._replace(came=frozenset(rank for rank in ranks if rank >= self.value.first)))

    def learn_left(self, rank: int) -> None:
        self.learn(self.value._replace(left=frozenset({rank})))
