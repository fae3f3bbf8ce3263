"""Which workers this one cannot reach itself, though others do: a link is cut, and nobody is dead.

A worker that waits for another one for long probes the link: it pings that one directly. If heartbeats of that one go
on coming through others, while it does not answer itself, the link between the two is cut, until it has answered again
for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gossamer.process.liveness.peer import NEVER, Peer, Timing
from gossamer.process.liveness.records import MAX_UNREACHABLE

MAX_PROBED = 4
"""Workers that are probed at once, since for most of them that takes a new connection."""


class Reachability:
    """The part of one worker. It only looks at what ``Liveness`` knows about its peers."""

    def __init__(self, peers: Mapping[int, Peer], timing: Timing) -> None:
        self._peers, self._timing = peers, timing
        self.unreachable: tuple[int, ...] = ()
        """Workers that this one cannot reach, ascending."""
        self._probed_at: dict[int, float] = {}
        """Since when those that are probed have not answered."""
        self._answers_since: dict[int, float] = {}
        """Since when those that could not be reached answer again."""
        self._ticked_at = self._pinged_at = self._probed_last_at = NEVER

    def probe(self, ranks: Iterable[int], now: float) -> None:
        """Begin to probe the links to these workers: a few at a time, those first that said nothing for longest."""
        if now - self._probed_last_at < self._timing.gossip_s:
            return
        known = {*self._probed_at, *self.unreachable}
        silent = [
            rank for rank in ranks if rank not in known and self._is_alive(rank) and not self._is_heard(rank, now)
        ]
        for rank in sorted(silent, key=lambda rank: self._peers[rank].answered_at)[:MAX_PROBED]:
            self._probed_at[rank] = self._probed_last_at = now

    def tick(self, now: float) -> list[int]:
        """Note what follows by now; return the workers that are to be pinged."""
        if now - self._ticked_at > self._timing.paused_s:
            # This process stood still: what has come meanwhile may not have been read yet.
            self._probed_at.clear()
        self._ticked_at = now
        if not self._probed_at and not self.unreachable:
            return []
        cut = {rank for rank in self.unreachable if self._is_alive(rank) and not self._is_whole(rank, now)}
        cut |= {rank for rank in list(self._probed_at) if self._is_cut(rank, now)}
        self.unreachable = tuple(sorted(cut)[:MAX_UNREACHABLE])
        if now - self._pinged_at < self._timing.gossip_s:
            return list(self._probed_at)
        self._pinged_at = now
        return [*self._probed_at, *self.unreachable]

    def _is_alive(self, rank: int) -> bool:
        return rank in self._peers and not self._peers[rank].dead

    def _is_heard(self, rank: int, now: float) -> bool:
        return now - self._peers[rank].answered_at <= self._timing.suspect_s

    def _is_cut(self, rank: int, now: float) -> bool:
        """Return whether a worker that is probed cannot be reached."""
        probed_at = self._probed_at[rank]
        if not self._is_alive(rank) or self._peers[rank].answered_at > probed_at:
            del self._probed_at[rank]
            return False
        moved_at = self._peers[rank].moved_at
        if now - moved_at > self._timing.paused_s:
            # It says nothing at all: perhaps its process stands still.
            self._probed_at[rank] = now
        if moved_at - probed_at < self._timing.cut_s:
            return False
        del self._probed_at[rank]
        self._answers_since.pop(rank, None)
        return True

    def _is_whole(self, rank: int, now: float) -> bool:
        """Return whether a worker that could not be reached has answered for long enough."""
        if not self._is_heard(rank, now):
            self._answers_since.pop(rank, None)
            return False
        return now - self._answers_since.setdefault(rank, now) >= self._timing.whole_s
