"""Who is alive: every worker leaves a number at the meeting point that goes up, beside its training."""

from __future__ import annotations

import time

from gossamer.process.store.failover_store import FailoverStore

SUSPECT_S = 0.5
"""A worker whose number has stood still for so long is dead if nobody listens any more where its own store was."""

DEAD_S = 3.0
"""After so long it is taken for dead, until it moves again, if its own store does not answer: that needs no Python, so
that of a process which is only busy does."""

HUNG_S = 60.0
"""After so long it is taken for dead whatever answers."""

BORN_S = 300.0
"""A worker that was never heard of may still be on its way for so long."""


class Heartbeats:
    """The heartbeats of all workers, as one of them sees them."""

    def __init__(self, rank: int, store: FailoverStore) -> None:
        self.rank, self.store = rank, store
        self._count = 0
        self.all_born = False
        """Everybody has been there: one that is not heard of is not on its way but gone."""
        self._seen: dict[int, tuple[bytes | None, float]] = {}
        self.lost: set[int] = set()
        """Who was dead when last looked at."""

    def beat(self) -> None:
        """Say that we are alive."""
        self._count += 1
        self.store.set(f"beat/{self.rank}", f"{time.time():.3f}/{self._count}")

    def dead(self, rank: int) -> bool:
        """Whether ``rank`` has not been heard of for a while."""
        if rank == self.rank:
            return False
        beat, now = self.store.get(f"beat/{rank}"), time.monotonic()
        seen = self._seen.get(rank)
        # A store that nobody has come to yet says nothing about them: they are as silent as they were.
        if seen is None or (beat is not None and seen[0] != beat):
            self._seen[rank] = (beat, now)
            self.lost.discard(rank)
            return False
        if rank not in self.lost and self._is_gone(rank, beat is not None, now - seen[1]):
            self.lost.add(rank)
        return rank in self.lost

    def _is_gone(self, rank: int, heard_of: bool, still_s: float) -> bool:
        if not heard_of and not self.all_born:
            return still_s > BORN_S
        if still_s < SUSPECT_S:
            return False
        if still_s > HUNG_S or not self.store.listens(rank):
            return True
        return still_s > DEAD_S and not self.store.answers(rank)
