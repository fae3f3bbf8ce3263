"""Groups of workers whose members all reach each other, while some links are cut and nobody is dead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple


class Division(NamedTuple):
    """How the workers that are there are divided."""

    groups: list[list[int]]
    """Empty if there is only one."""
    links: list[tuple[int, int]]
    """Between which two workers the link is cut, ascending, if there are several groups."""
    apart: frozenset[int]
    """Who is in another group than the worker that knows this."""


WHOLE = Division([], [], frozenset())


class Grouping:
    """Who is in one group with a worker, as far as it knows which links are cut. All who know the same agree."""

    def __init__(self, rank: int, everybody: Collection[int], absent: Callable[[int], bool]) -> None:
        """``absent(rank)``: that worker is dead, so it is in no group."""
        self._rank, self._everybody, self._absent = rank, everybody, absent
        self._unreachable: dict[int, tuple[int, ...]] = {}
        """Whom each worker says that it cannot reach, of those that say so."""
        self._divided: tuple[list[int], dict[int, tuple[int, ...]]] | None = None
        """Who was there, and what they said, when the workers were divided last."""
        self.division = WHOLE
        """Other threads only read it: take it once, since it is replaced."""

    @property
    def apart(self) -> frozenset[int]:
        """Who is in another group."""
        return self.division.apart

    def hear(self, rank: int, unreachable: tuple[int, ...]) -> None:
        """A worker, perhaps this one, says that it cannot reach these. It counts with the next ``renew``."""
        if unreachable:
            self._unreachable[rank] = unreachable
        else:
            self._unreachable.pop(rank, None)

    def renew(self) -> None:
        """Divide the workers anew if somebody is absent or there again, or says something else."""
        if not self._unreachable:
            self._divided, self.division = None, WHOLE
            return
        there = [rank for rank in self._everybody if rank == self._rank or not self._absent(rank)]
        if self._divided == (there, self._unreachable):
            return
        self._divided = there, dict(self._unreachable)
        groups = divide(there, self._unreachable)
        if len(groups) == 1:
            self.division = WHOLE
            return
        cut = _cut_links(there, self._unreachable)
        links = sorted((one, other) for one, others in cut.items() for other in others if one < other)
        apart = frozenset(rank for group in groups if self._rank not in group for rank in group)
        self.division = Division(groups, links, apart)


def divide(ranks: Iterable[int], unreachable: Mapping[int, Collection[int]]) -> list[list[int]]:
    """Divide workers into groups, ascending each. ``unreachable``: whom some of them say that they cannot reach.

    Whoever has most cut links leaves the group, of several the highest rank, until no cut link is left in it. Those who
    have left form groups in the same way.
    """
    groups: list[list[int]] = []
    left = sorted(ranks)
    while left:
        cut = _cut_links(left, unreachable)
        # How many cut links each has to those that are still in the group.
        counts = {rank: len(others) for rank, others in cut.items()}
        while counts:
            most, leaves = max((count, rank) for rank, count in counts.items())
            if most == 0:
                break
            del counts[leaves]
            for other in cut[leaves]:
                if other in counts:
                    counts[other] -= 1
        group = {rank for rank in left if rank not in cut or rank in counts}
        for rank in sorted(cut):
            if cut[rank].isdisjoint(group):
                group.add(rank)
        groups.append(sorted(group))
        left = [rank for rank in left if rank not in group]
    return groups


def _cut_links(ranks: Collection[int], unreachable: Mapping[int, Collection[int]]) -> dict[int, set[int]]:
    """Return to whom the links of each of ``ranks`` are cut, of those that have such. One of the two says so."""
    there, cut = set(ranks), dict[int, set[int]]()
    for one in there & unreachable.keys():
        for other in there.intersection(unreachable[one]) - {one}:
            cut.setdefault(one, set()).add(other)
            cut.setdefault(other, set()).add(one)
    return cut
