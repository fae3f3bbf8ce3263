"""Who is alive: every worker leaves a number at the meeting point that goes up, beside its training."""

from __future__ import annotations

import time

from gossamer.process.meeting_point import MeetingPoint

DEAD_S = 3.0
"""A worker whose number has stood still for so long is taken for dead, until it moves again."""

BORN_S = 300.0
"""A worker that was never heard of may still be on its way for so long."""


class Beats:
    """The heartbeats of all workers, as one of them sees them."""

    def __init__(self, rank: int, point: MeetingPoint) -> None:
        self.rank, self.point = rank, point
        self._count = 0
        self.all_born = False
        """Everybody has been there: one that is not heard of is not on its way but gone."""
        self._seen: dict[int, tuple[bytes | None, float]] = {}

    def beat(self) -> None:
        """Say that we are alive."""
        self._count += 1
        self.point.set(f"beat/{self.rank}", f"{time.time():.3f}/{self._count}")

    def dead(self, rank: int) -> bool:
        """Whether ``rank`` has not been heard of for a while."""
        if rank == self.rank:
            return False
        beat, now = self.point.get(f"beat/{rank}"), time.monotonic()
        seen = self._seen.get(rank)
        if seen is None or seen[0] != beat:
            self._seen[rank] = (beat, now)
            return False
        return now - seen[1] > (DEAD_S if beat is not None or self.all_born else BORN_S)
