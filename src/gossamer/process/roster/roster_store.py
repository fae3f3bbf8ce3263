"""The roster in the store: for workers that come later, and for those that no message reached."""

from __future__ import annotations

import logging
import time

from gossamer.errors import InputError
from gossamer.process.roster.roster import MAX_RANKS, KnownRoster, Roster, read_roster
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.parsing import Refusals

KEY, NUM_GIVEN = "roster", "roster/given"
READ_INTERVAL_S = 1.0

logger = logging.getLogger("gossamer")


class RosterStore:
    """Reads and writes the roster for one worker."""

    def __init__(self, store: FailoverStore, known: KnownRoster, refusals: Refusals) -> None:
        self._store, self._known, self._refusals = store, known, refusals
        self._read_at = float("-inf")
        known.refresh = self.read

    def read(self) -> None:
        self._read_at = time.monotonic()
        value = self._store.get(KEY)
        stored = self._refusals.checked(KEY, value, read_roster(value))
        if stored is not None:
            self._known.learn(stored)
        elif value is not None:
            # Those that come later need it.
            self._store.compare_set(KEY, self._known.value.to_text(), value)

    def poll(self) -> None:
        """Read it now and then. Runs in the thread that follows the store."""
        if time.monotonic() - self._read_at > READ_INTERVAL_S:
            self.read()

    def publish(self) -> None:
        """Add what this worker knows to what the store has. The store may be new."""
        known = self._known.value
        while True:
            value = self._store.get(KEY)
            stored = read_roster(value)
            merged = known if stored is None else known.merged(stored)
            if stored == merged:
                break
            now = self._store.compare_set(KEY, merged.to_text(), value or b"")
            if now is None or now == merged.to_text().encode():
                break
        self._known.learn(merged)
        if merged.came:
            # Numbers that were given by a store that is gone must not be given again.
            self._store.compare_set(NUM_GIVEN, str(merged.largest + 1 - merged.first))


def check_place(rank: int, known: KnownRoster) -> None:
    """Raise InputError if this rank has left the run for good."""
    if rank not in known:
        raise InputError(
            f"rank {rank} has left this run for good, or the others have given it up: come as a new worker, with "
            'gossamer train --join HOST:PORT or join(…, at="HOST:PORT")'
        )


def read_from(store: FailoverStore) -> Roster | None:
    return read_roster(store.get(KEY))


def take_rank(store: FailoverStore, roster: Roster) -> int | None:
    """Return a rank that no process had before; None if the store cannot be reached."""
    refusals, so_far = Refusals(logger.warning), roster.largest + 1 - roster.first
    while True:
        given = refusals.add(store, NUM_GIVEN, 1, so_far)
        if given is None:
            return None
        if roster.first - 1 + given >= MAX_RANKS:
            refusals.refuse(NUM_GIVEN, f"refused what the store has at {NUM_GIVEN}")
            store.compare_set(NUM_GIVEN, str(so_far), str(given))
        elif roster.first - 1 + given > roster.largest:
            return roster.first - 1 + given
