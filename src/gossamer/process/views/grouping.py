"""Groups of workers whose members all reach each other, while some links are cut and nobody is dead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import combinations


class Grouping:
    """Who is in one group with a worker, as far as it knows which links are cut. All who know the same agree."""

    def __init__(self, rank: int, everybody: Collection[int], absent: Callable[[int], bool]) -> None:
        """``absent(rank)``: that worker is dead, so it is in no group."""
        self._rank, self._everybody, self._absent = rank, everybody, absent
        self._unreachable: dict[int, tuple[int, ...]] = {}
        """Whom each worker says that it cannot reach."""
        self.groups: list[list[int]] = []
        """The groups of those that are there; empty if there is only one."""
        self.apart: frozenset[int] = frozenset()
        """Who is in another group."""

    def hear(self, rank: int, unreachable: tuple[int, ...]) -> None:
        """A worker, perhaps this one, says that it cannot reach these."""
        if self._unreachable.get(rank, ()) != unreachable:
            self._unreachable = {**self._unreachable, rank: unreachable}
            self.renew()

    def renew(self) -> None:
        """Somebody is absent or there again."""
        if not self.groups and not any(self._unreachable.values()):
            return
        there = [rank for rank in self._everybody if rank == self._rank or not self._absent(rank)]
        groups = divide(there, self._unreachable)
        self.groups = groups if len(groups) > 1 else []
        self.apart = frozenset(rank for group in self.groups if self._rank not in group for rank in group)

    def cut_links(self) -> list[tuple[int, int]]:
        """Return the pairs of workers that cannot reach each other, ascending; from any thread."""
        ranks, unreachable = sorted(rank for group in self.groups for rank in group), self._unreachable
        return [pair for pair in combinations(ranks, 2) if _are_apart(*pair, unreachable)]


def divide(ranks: Iterable[int], unreachable: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Divide workers into groups, ascending each. ``unreachable``: whom some of them say that they cannot reach.

    Whoever has most cut links leaves the group, of several the highest rank, until no cut link is left in it. Those who
    have left form groups in the same way.
    """
    groups: list[list[int]] = []
    left = sorted(ranks)
    while left:
        cut: dict[int, set[int]] = {rank: set() for rank in left}
        for one, other in combinations(left, 2):
            if _are_apart(one, other, unreachable):
                cut[one].add(other)
                cut[other].add(one)
        group = set(left)
        while any(cut[rank] & group for rank in group):
            _, leaves = max((len(cut[rank] & group), rank) for rank in group)
            group.remove(leaves)
        for rank in left:
            if not cut[rank] & group:
                group.add(rank)
        groups.append(sorted(group))
        left = [rank for rank in left if rank not in group]
    return groups


def _are_apart(one: int, other: int, unreachable: Mapping[int, Collection[int]]) -> bool:
    """Return whether either of the two says that it cannot reach the other."""
    return other in unreachable.get(one, ()) or one in unreachable.get(other, ())
