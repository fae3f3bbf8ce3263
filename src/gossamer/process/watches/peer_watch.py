"""Says what becomes of the other workers: one dies, fails, comes back, is slow; this worker is alone.

The texts are the same on all workers, so that a program that reads them all can say each once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from statistics import median_low

from gossamer.errors import one_line
from gossamer.process.events import EventKind, Events
from gossamer.process.liveness.heartbeats import Heartbeats, Progress
from gossamer.process.roster.roster import Roster

WINDOW_S = 5.0
"""Over this time the speed of workers is compared."""

NUM_WINDOWS = 2
"""A worker is slow if it was so in this many windows in a row: a pause, for an evaluation for example, is none."""

SLOW_RATIO, RECOVERED_RATIO = 2.0, 1.5
"""Time of a step beside the median worker's."""

MIN_DIFFERENCE_S = 0.002
"""Steps that differ by less than this are as fast as each other."""


MAX_REASON = 300
"""Characters of a worker's reason to leave that the others are told."""


def death_text(rank: int) -> str:
    return f"worker {rank} died or cannot be reached"


def return_text(rank: int) -> str:
    return f"worker {rank} is back"


def came_text(rank: int) -> str:
    return f"worker {rank} has come to the run"


def left_text(rank: int) -> str:
    return f"worker {rank} has left for good"


class PeerWatch:
    def __init__(self, everybody: Collection[int], heartbeats: Heartbeats, events: Events, lockstep: bool) -> None:
        """``lockstep``: workers wait for each other, so one without a step may only be waiting."""
        self._everybody, self._heartbeats, self._events, self._lockstep = everybody, heartbeats, events, lockstep
        self.ended = False
        """The final average is complete: from now on workers leave, and none dies."""
        self._alone = False
        self._window_began = time.monotonic()
        self._marks: dict[int, Progress] = {}
        self._slow: set[int] = set()
        self._num_slow: Counter[int] = Counter()
        heartbeats.on_death, heartbeats.on_return = self._on_death, self._on_return

    def publish_failure(self, error: BaseException | None) -> None:
        """Tell the others which exception ends the program of this worker; None: it is alive."""
        if self._heartbeats.muted:
            return
        reason = "" if error is None else one_line(error)
        self._heartbeats.store.set(f"failure/{self._heartbeats.rank}", reason[:MAX_REASON])

    def _on_death(self, rank: int) -> None:
        if self.ended or self._heartbeats.left(rank):
            return
        self._events.add(EventKind.DIED, death_text(rank), rank)
        published = (self._heartbeats.store.get(f"failure/{rank}") or b"").decode(errors="replace")[:MAX_REASON]
        if published:
            reason = "".join(character if character.isprintable() else "?" for character in published)
            text = f"worker {rank} left, since an exception ended its program: {reason}"
            self._events.add(EventKind.FAILED, text, rank)
        if not self._alone and len(self._heartbeats.lost) == len(self._everybody) - 1:
            self._alone = True
            self._events.add(EventKind.ALONE, "no other worker is left: this one goes on alone")

    def _on_return(self, rank: int) -> None:
        if self.ended:
            return
        self._alone = False
        self._events.add(EventKind.RETURNED, return_text(rank), rank)

    def on_roster_change(self, before: Roster, after: Roster) -> None:
        """Some workers have come, or left for good."""
        if self.ended:
            return
        for rank in sorted(after.came - before.came - {self._heartbeats.rank}):
            self._events.add(EventKind.CAME, came_text(rank), rank)
        for rank in sorted(after.left - before.left):
            self._events.add(EventKind.LEFT, left_text(rank), rank)

    def poll(self) -> None:
        """Compare the speed of the workers, if that is due. Runs in the heartbeat thread."""
        now = time.monotonic()
        window_s = now - self._window_began
        if window_s < WINDOW_S:
            return
        self._window_began = now
        progress = {self._heartbeats.rank: self._heartbeats.own_progress(), **self._heartbeats.progress}
        marks, self._marks = self._marks, progress
        if self.ended or len(self._everybody) == 1:
            return
        training = [rank for rank in progress if rank not in self._heartbeats.lost and not self._heartbeats.done(rank)]
        step_s: dict[int, float] = {}
        for rank in training:
            gained = _gained(marks.get(rank), progress[rank], window_s, self._lockstep)
            if gained is not None:
                step_s[rank] = gained
        if len(step_s) > 1:
            self._judge(step_s, median_low(step_s.values()))

    def _judge(self, step_s: dict[int, float], median_s: float) -> None:
        for rank, seconds in step_s.items():
            slow = seconds > SLOW_RATIO * median_s and seconds - median_s > MIN_DIFFERENCE_S
            self._num_slow[rank] = self._num_slow[rank] + 1 if slow else 0
            if self._num_slow[rank] >= NUM_WINDOWS and rank not in self._slow:
                self._slow.add(rank)
                text = f"worker {rank} is slow: more than twice the time of the median worker for a step"
                self._events.add(EventKind.SLOW, text, rank)
            elif rank in self._slow and seconds < RECOVERED_RATIO * median_s:
                self._slow.remove(rank)
                self._events.add(EventKind.RECOVERED, f"worker {rank} is not slow any more", rank)


def _gained(mark: Progress | None, now: Progress, window_s: float, lockstep: bool) -> float | None:
    """Return the time per step in the window; None if it is not known."""
    if mark is None or not mark.steps or now.steps < mark.steps:
        return None
    steps = now.steps - mark.steps
    if steps == 0:
        return None if lockstep else window_s
    return (now.busy_s - mark.busy_s) / steps
