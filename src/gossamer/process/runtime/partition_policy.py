"""What a worker does while it cannot reach the others: it trains on, or waits until it can reach more than half."""

from __future__ import annotations

import time
from collections.abc import Collection

from gossamer.errors import InputError
from gossamer.process.events import EventKind, Events
from gossamer.process.joining.join_facts import name_ranks
from gossamer.process.lifecycle import Lifecycle
from gossamer.process.liveness.heartbeats import Heartbeats

CONTINUE, MAJORITY = "continue", "majority"
POLICIES = (CONTINUE, MAJORITY)

POLL_S = 0.05


def check_policy(partition: str) -> None:
    if partition not in POLICIES:
        raise InputError(f"partition is {partition!r}: expected {' or '.join(map(repr, POLICIES))}")


class PartitionPolicy:
    def __init__(
        self, partition: str, everybody: Collection[int], heartbeats: Heartbeats, events: Events, lifecycle: Lifecycle
    ) -> None:
        self.partition, self.everybody = partition, everybody
        self._heartbeats, self._events, self._lifecycle = heartbeats, events, lifecycle

    def may_train(self) -> bool:
        """Return whether this worker may make steps without those that it cannot reach."""
        if self.partition == CONTINUE:
            return True
        reached = set(self.everybody) - self._heartbeats.lost
        # Of two equal halves the one with the lowest rank goes on: worker 0, unless it has left for good.
        half = 2 * len(reached) == len(self.everybody) and min(self.everybody) in reached
        return 2 * len(reached) > len(self.everybody) or half

    def wait(self) -> float:
        """Wait until this worker may train; return for how many seconds it waited."""
        if self.may_train():
            return 0.0
        began = time.monotonic()
        missing = name_ranks(sorted(self._heartbeats.lost))
        text = f"training pauses: {missing} cannot be reached, and that is half of the workers or more"
        self._events.add(EventKind.PAUSED, text)
        while not self.may_train() and not self._lifecycle.closed:
            time.sleep(POLL_S)
        waited_s = time.monotonic() - began
        self._events.add(EventKind.RESUMED, f"training goes on after a pause of {waited_s:.0f} s")
        return waited_s
