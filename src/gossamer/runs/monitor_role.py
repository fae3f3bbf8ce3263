"""Which worker of a loop of one's own monitors the run: one at a time, by an entry in the store.

Rank 0 begins. If the monitor dies and stays away, or leaves, the lowest rank alive takes over; a monitor that comes
back before that continues as the monitor.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

from gossamer.process.liveness.heartbeats import Heartbeats
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.parsing import read_number

KEY = "output/monitor"
CHECK_S = 1.0

TAKE_OVER_S = 3.0
"""How long a monitor is away before another worker takes over."""


class MonitorRole:
    def __init__(
        self, rank: int, store: FailoverStore, heartbeats: Heartbeats, has_left: Callable[[int], bool]
    ) -> None:
        """``has_left(rank)``: whether that worker has published that it makes no more steps."""
        self.rank, self.store, self.heartbeats, self._has_left = rank, store, heartbeats, has_left
        self._id = f"{rank}/{uuid.uuid4().hex[:8]}"
        self._vacant_since: float | None = None
        self._checked_at = 0.0
        self.held = False
        """Whether this worker is the monitor."""
        # First: a worker that comes back finds this entry when it finds that the run has begun.
        store.on_move.insert(0, self._republish)

    def _republish(self) -> None:
        if self.held:
            self.store.compare_set(KEY, self._id)

    def poll(self) -> bool:
        """Check, now and then, whether this worker is the monitor, and take the role over if it is due."""
        if time.monotonic() - self._checked_at > CHECK_S:
            self._checked_at = time.monotonic()
            self.check(TAKE_OVER_S)
        return self.held

    def check(self, take_over_s: float) -> bool:
        """Check whether this worker is the monitor; take over from one that has been away for ``take_over_s``."""
        value = self.store.get(KEY)
        if value is None and self.held:
            # The store is new, or cannot be reached: then nobody else can take over either.
            value = self.store.compare_set(KEY, self._id)
            if value is None:
                return True
        owner = value.decode(errors="replace") if value is not None else ""
        # Only one may write: who has lost the entry, in a move to another store, steps down.
        self.held = owner == self._id or (self._may_take_over(owner, take_over_s) and self._claim(owner))
        return self.held

    def is_vacant(self) -> bool:
        """Return whether the monitor is dead, or there is none."""
        owner = _rank_of(self.store.get(KEY))
        return owner is None or self._is_away(owner)

    def _is_away(self, rank: int) -> bool:
        return rank in self.heartbeats.lost or rank not in self.heartbeats.everybody

    def release(self) -> None:
        """Let another worker take over at once."""
        self.held = False
        self.store.compare_set(KEY, "", self._id)

    def _claim(self, expected: str) -> bool:
        return self.store.compare_set(KEY, self._id, expected) == self._id.encode()

    def _may_take_over(self, owner: str, take_over_s: float) -> bool:
        owner_rank = _rank_of(owner.encode())
        if owner_rank == self.rank:
            # An earlier process of this worker, which is dead: this one is here.
            return True
        # A store that is new has no entry before the monitor has published its own again.
        if owner_rank is not None and not self._is_away(owner_rank):
            self._vacant_since = None
            return False
        if self._vacant_since is None:
            self._vacant_since = time.monotonic()
        return time.monotonic() - self._vacant_since >= take_over_s and self._is_lowest()

    def _before(self) -> list[int]:
        return [rank for rank in self.heartbeats.everybody if rank < self.rank]

    def _is_lowest(self) -> bool:
        return all(rank in self.heartbeats.lost or self._has_left(rank) for rank in self._before())


def _rank_of(owner: bytes | None) -> int | None:
    """Return the rank in the entry of a monitor; None if there is none, or none that can be read."""
    return read_number((owner or b"").partition(b"/")[0])
