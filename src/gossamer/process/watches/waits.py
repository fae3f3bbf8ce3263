"""Says for whom the user's thread waits, if it waits for long: they may never come."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from gossamer.errors import InputError
from gossamer.process.events import EventKind, Events
from gossamer.process.joining.join_facts import name_ranks
from gossamer.process.liveness.heartbeats import Heartbeats, Progress

SAY_AFTER_S = 10.0


class FinishWait:
    """The wait of ``finish`` for the workers that still train. It is said once, if they make no steps."""

    def __init__(self, everybody: Collection[int], heartbeats: Heartbeats, events: Events) -> None:
        self._everybody, self._heartbeats, self._events = everybody, heartbeats, events
        self._progress: dict[int, Progress] = {}
        self._moved_at = time.monotonic()
        self._said = False

    def poll(self) -> None:
        """Call it while the wait lasts."""
        if self._said:
            return
        now, progress = time.monotonic(), dict(self._heartbeats.progress)
        if progress != self._progress:
            self._progress, self._moved_at = progress, now
        if now - self._moved_at < SAY_AFTER_S:
            return
        self._said = True
        others = [rank for rank in self._everybody if rank != self._heartbeats.rank]
        waited_for = [rank for rank in others if rank not in self._heartbeats.lost and not self._heartbeats.done(rank)]
        if waited_for:
            text = (
                f"finish() waits for {name_ranks(waited_for)}, without a step for {SAY_AFTER_S:.0f} s: all workers "
                "must call finish(), and finish several swarms in the same order"
            )
            self._events.add(EventKind.WAITING, text)


def series_line(name: str, missing: list[int]) -> str:
    """Return the line about a call that waits for workers."""
    return (
        f"swarm.{name} has waited for {SAY_AFTER_S:.0f} s for {name_ranks(missing)}: all workers must call it, "
        "equally often and in the same order"
    )


class JoinWait:
    """The wait of ``join`` for the others, at most ``timeout_s`` from now on."""

    def __init__(
        self, everybody: Collection[int], heartbeats: Heartbeats, timeout_s: float, check: Callable[[], None]
    ) -> None:
        """``check()``: raises InputError if the wait has no sense any more."""
        self._everybody, self._heartbeats, self._timeout_s, self._check = everybody, heartbeats, timeout_s, check
        self._until = time.monotonic() + timeout_s

    def too_late(self) -> bool:
        """Raise InputError if the others have let this worker wait for too long; otherwise return False."""
        self._check()
        if time.monotonic() > self._until:
            rank, lost = self._heartbeats.rank, self._heartbeats.lost
            alive = [other for other in self._everybody if other != rank and other not in lost]
            raise InputError(
                f"the other workers did not connect with worker {rank} within {self._timeout_s:.0f} s "
                f"(alive: {name_ranks(alive) if alive else 'none'}): look at their output, or give a longer timeout"
            )
        return False
