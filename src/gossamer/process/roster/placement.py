"""Where a worker is among those of the run: what its method sees as its rank, its topology and its neighbours.

A topology has the workers 0 … n − 1. Once some have left for good, the ranks of the others have gaps: the i-th of them,
in the order of their ranks, is at *position* i of a topology for so many workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gossamer.topology import Topology, resized


class Placement(NamedTuple):
    """Who is where in the topology."""

    topology: Topology
    ranks: tuple[int, ...]
    """By position, ascending."""

    def position(self, rank: int) -> int:
        """Return the position of a worker; of one that is on the roster no more, where it would be."""
        return sum(other < rank for other in self.ranks)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a worker's neighbours; none if it is on the roster no more."""
        if rank not in self.ranks:
            return ()
        return self.to_ranks(self.topology.neighbours(self.position(rank)))

    def describe(self) -> str:
        return f"the run has {len(self.ranks)} workers now: {self.topology.name}"

    def rank_at(self, position: int) -> int:
        return self.ranks[position]

    def to_ranks(self, positions: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks at these positions, without those that are not there."""
        return tuple(self.ranks[position] for position in positions if 0 <= position < len(self.ranks))


def place(first: Topology, ranks: tuple[int, ...]) -> Placement:
    """Return the placement of these workers. ``first``: the topology with which the run began."""
    return Placement(resized(first, max(1, len(ranks))), ranks)
