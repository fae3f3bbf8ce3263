"""The ring of the workers that are there, and who is near to one of them in it."""

from __future__ import annotations

from bisect import bisect_left


class Ring:
    """The workers that are there, sorted by rank. One that comes or goes costs less than to look at all of them."""

    def __init__(self, own: int) -> None:
        self._own, self._ranks = own, [own]
        self._neighbours: list[int] | None = None

    def set_present(self, rank: int, present: bool) -> None:
        at = bisect_left(self._ranks, rank)
        if present == (self._ranks[at : at + 1] == [rank]):
            return
        if present:
            self._ranks.insert(at, rank)
        else:
            del self._ranks[at]
        self._neighbours = None

    def neighbours(self) -> list[int]:
        """Return the workers that the own one tells what it knows: few, beside it and across the ring.

        Both ends of such a pair send. So news reaches n workers in about √n / 2 messages one after the other.
        """
        if self._neighbours is None:
            ranks = self._ranks
            at, size = bisect_left(ranks, self._own), len(ranks)
            across = max(2, round(size**0.5))
            found = {ranks[(at + offset) % size] for offset in (-across, -1, 1, across)}
            self._neighbours = sorted(found - {self._own})
        return self._neighbours
