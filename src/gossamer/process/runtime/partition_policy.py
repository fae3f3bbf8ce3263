"""What a worker does while it cannot reach the others: it trains on, or waits until it can reach more than half."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gossamer.errors import InputError
from gossamer.process.events import EventKind, Events
from gossamer.process.joining.join_facts import name_ranks
from gossamer.process.lifecycle import Lifecycle
from gossamer.process.liveness.heartbeats import Heartbeats
from gossamer.process.views.grouping import Grouping

CONTINUE, MAJORITY = "continue", "majority"
POLICIES = (CONTINUE, MAJORITY)

POLL_S = 0.05
MAX_NAMED = 4
"""Pairs of workers that a line names."""


def check_policy(partition: str) -> None:
    if partition not in POLICIES:
        raise InputError(f"partition is {partition!r}: expected {' or '.join(map(repr, POLICIES))}")


def cut_text(groups: Sequence[Sequence[int]], pairs: Sequence[tuple[int, int]]) -> str:
    """Return what is said about workers that cannot reach each other: the same on all of them."""
    links = ", ".join(f"{one} and {other}" for one, other in pairs[:MAX_NAMED])
    more = f" and {len(pairs) - MAX_NAMED} more pairs" if len(pairs) > MAX_NAMED else ""
    *first, last = (f"worker{'s' if len(group) > 1 else ''} {', '.join(map(str, group))}" for group in groups)
    return (
        f"workers {links}{more} cannot reach each other: until they can, {', '.join(first)} and {last} train separately"
    )


class PartitionPolicy:
    def __init__(
        self, partition: str, heartbeats: Heartbeats, grouping: Grouping, events: Events, lifecycle: Lifecycle
    ) -> None:
        self.partition, self.everybody = partition, heartbeats.everybody
        self._heartbeats, self._grouping, self._events, self._lifecycle = heartbeats, grouping, events, lifecycle
        self._said = ""

    @property
    def _missing(self) -> set[int]:
        return {*self._heartbeats.lost, *self._grouping.apart}

    def poll(self) -> None:
        """Say which workers cannot reach each other, if that has changed. Runs in the heartbeat thread."""
        # Once: the loop replaces it meanwhile.
        groups, links, _ = self._grouping.division
        text = cut_text(groups, links) if links else ""
        if text and text != self._said:
            self._events.add(EventKind.CUT, text, groups[-1][0])
        self._said = text

    def may_train(self) -> bool:
        """Return whether this worker may make steps without those that it cannot reach."""
        if self.partition == CONTINUE:
            return True
        reached = set(self.everybody) - self._missing
        # Of two equal halves the one with the lowest rank goes on: worker 0, unless it has left for good.
        half = 2 * len(reached) == len(self.everybody) and min(self.everybody) in reached
        return 2 * len(reached) > len(self.everybody) or half

    def wait(self) -> float:
        """Wait until this worker may train, or will not any more; return for how many seconds it waited."""
        if self.may_train():
            return 0.0
        began = time.monotonic()
        missing = name_ranks(sorted(self._missing))
        text = f"training pauses: {missing} cannot be reached, and that is half of the workers or more"
        self._events.add(EventKind.PAUSED, text)
        while not self.may_train() and not self._lifecycle.stopped:
            time.sleep(POLL_S)
        waited_s = time.monotonic() - began
        if not self._lifecycle.stopped:
            self._events.add(EventKind.RESUMED, f"training goes on after a pause of {waited_s:.0f} s")
        return waited_s
