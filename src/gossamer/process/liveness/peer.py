"""What a worker knows about another one, and after how long it thinks what."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.process.liveness.records import Record, Stage
from gossamer.process.net.connection import Address

NEVER = float("-inf")

MAX_PINGS = 4
"""Silent workers that are pinged at a time: if this worker has been slow, all seem to be silent."""

ALIVE_COUNTS = 5
"""A dead worker that others have heard of is alive again if its counter has moved this far: less may have been on its
way when it died."""

RAISE_S = 1.0
"""How often a worker raises its number above that of one and the same other process of its rank."""


@dataclass(frozen=True)
class Timing:
    """Times in seconds."""

    tick_s: float = 0.1
    gossip_s: float = 0.2
    """Between two messages to a neighbour that hold no news."""
    suspect_s: float = 0.5
    """A worker whose counter has stood still for this long is pinged, and dead if nothing listens at its address."""
    dead_s: float = 4.0
    """After this long it is dead if it has not answered for as long. A busy process answers, a stopped one does not."""
    hung_s: float = 60.0
    """After this long it is dead even if it answers."""
    first_s: float = 300.0
    """How long a worker that was never heard of may still be starting."""
    cut_s: float = 1.5
    """A worker that does not answer for this long while others pass on its heartbeats cannot be reached directly."""
    whole_s: float = 1.0
    """After it has answered again for this long it can be reached."""
    paused_s: float = 1.0
    """A tick that is later than this shows that this process stood still: it could not have heard anything."""


class Peer:
    """What is known about another worker."""

    def __init__(self, now: float) -> None:
        self.record: Record | None = None
        self.heartbeats = 0
        """The highest count of its process that is known: that of its record may be lower."""
        self.moved_at = now
        """When its counter last moved, as far as is known here."""
        self.answered_at = NEVER
        """When a message last came from itself."""
        self.refused_at = NEVER
        """When nothing listened at its address."""
        self.dead = False
        self.died_at = NEVER
        """When it was found dead."""
        self.watched_from = NEVER
        """Since when its counter is expected to move."""
        self.suspected_at = NEVER
        """From when on it has to be heard of, after somebody else has found it dead."""
        self.last_heartbeats: int | None = None
        """Its counter when it died, as somebody has told it afterwards."""

    def take(self, record: Record, now: float) -> bool:
        """Take over a newer record; return whether its counter has moved."""
        replaced = self.record is not None and record.process > self.record.process
        moved = self.record is None or replaced or record.heartbeats > self.heartbeats
        self.record = record
        if moved:
            self.heartbeats, self.moved_at = record.heartbeats, now
        if replaced:
            self.answered_at = self.refused_at = NEVER
        return moved

    def is_revived_by(self, timing: Timing, record: Record, speaks: bool, now: float) -> bool:
        """Return whether a dead process is alive after all. ``speaks``: it has said this itself, and has counted on."""
        if self.last_heartbeats is None:
            # What others have heard of it may be newer than what was known here, and older than its death.
            self.last_heartbeats = record.heartbeats
        # What it said itself may have been on its way too, but not for long.
        said_after = speaks and now - self.died_at >= timing.suspect_s
        return said_after or record.heartbeats >= self.last_heartbeats + ALIVE_COUNTS

    @property
    def newest_record(self) -> Record | None:
        if self.record is None or self.record.heartbeats == self.heartbeats:
            return self.record
        return self.record._replace(heartbeats=self.heartbeats)

    @property
    def is_there(self) -> bool:
        return not self.dead and self.record is not None and self.record.stage < Stage.LEFT

    def is_progressing(self, timing: Timing, now: float) -> bool:
        """Return whether its counter has moved lately, and nobody else has found it dead: most often that is so."""
        if self.record is None or self.suspected_at != NEVER:
            return False
        return now - self.moved_at < timing.suspect_s or now - self.watched_from < timing.suspect_s

    def is_dead(self, timing: Timing, now: float, all_seen: bool) -> bool:
        """Return whether it counts as dead. ``all_seen``: it has been heard of, or should have been."""
        moved_at = max(self.moved_at, self.watched_from)
        silent_s = now - moved_at
        if self.record is None and not all_seen:
            return silent_s > timing.first_s
        if NEVER < self.suspected_at < self.refused_at:
            return True
        if silent_s < timing.suspect_s:
            return False
        if self.refused_at > self.moved_at or silent_s > timing.hung_s:
            return True
        return now - max(moved_at, self.answered_at, self.suspected_at) > timing.dead_s


class OwnRank:
    """What a worker hears of other processes of its own rank: it takes a higher number than theirs.

    They may have the same number: one that was killed after it had raised its own, as the next one does.
    """

    def __init__(self) -> None:
        self._address: Address | None = None
        """Of the one above which this worker has raised its number last."""
        self._raised_at = NEVER

    def must_raise(self, record: Record, own: Record, now: float) -> bool:
        """Return whether to take a higher number than that of ``record``, which is of this worker's rank."""
        if not record.is_newer_than(own):
            return False
        # Two live processes would raise theirs above each other without end, and each time all others take one of them
        # for the successor of the other.
        if self._is_last(record) and now - self._raised_at < RAISE_S:
            return False
        self._address, self._raised_at = record.address, now
        return True

    def is_alive(self, record: Record, own: Record) -> bool:
        """Return whether the process of ``record`` is alive: only such a one raises its number above the own one."""
        return self._is_last(record) and record.process > own.process and record.address != own.address

    def _is_last(self, record: Record) -> bool:
        return record.address == self._address
