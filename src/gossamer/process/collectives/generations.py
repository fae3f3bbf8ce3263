"""The generations of a membership in the store: which one is requested, who is present in it, who its members are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from gossamer.process.collectives import group_builder
from gossamer.process.liveness.heartbeats import Heartbeats
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.parsing import Refusals, read_number, read_ranks

TRAIN, AVERAGED, FINISH = PURPOSES = "train", "averaged", "finish"
"""The purposes of memberships: training, the average that a user asks for, the final average."""

READ_INTERVAL_S = 2.0
"""How often the requested generation is read in the store, in case a message about it was lost."""


class Generations:
    def __init__(
        self,
        purpose: str,
        rank: int,
        everybody: range,
        store: FailoverStore,
        refusals: Refusals,
        heartbeats: Heartbeats,
    ) -> None:
        self.key, self.rank, self.everybody = f"group/{purpose}", rank, everybody
        self._store, self._refusals, self._heartbeats = store, refusals, heartbeats
        self._membership = PURPOSES.index(purpose)
        self._read_at = float("-inf")
        self.requested = 0
        """The newest generation that is requested, as far as this worker knows."""

    def request(self, generation: int) -> None:
        """Request this generation, or a later one that is already requested."""
        self.requested = max(self.requested, generation)
        self._raise_request(lambda current: max(current, self.requested))

    def request_next(self) -> None:
        """Request the generation after the newest one in the store."""
        self._raise_request(lambda current: current + 1)

    def _raise_request(self, raised: Callable[[int], int]) -> None:
        """Raise the requested generation in the store, then tell the others; they may do so at the same time."""
        self._raise_in_store(raised)
        self._heartbeats.request(self._membership, self.requested)

    def _raise_in_store(self, raised: Callable[[int], int]) -> None:
        key = f"{self.key}/requested"
        while True:
            value = self._store.get(key)
            current = self._refusals.checked(key, value, read_number(value))
            wanted = raised(-1 if current is None else current)
            if current is not None and current >= wanted:
                return
            if value is not None and current is None:
                # What cannot be read cannot be compared either. A higher number that is lost is requested again.
                self._store.set(key, str(wanted))
                self.requested = max(self.requested, wanted)
                return
            stored = self._store.compare_set(key, str(wanted), expected="" if current is None else str(current))
            if stored is None or stored == str(wanted).encode():
                self.requested = max(self.requested, wanted)
                return

    def follow(self) -> None:
        """Note which generation the others have told of; now and then read it in the store too."""
        self.requested = max(self.requested, self._heartbeats.requested(self._membership))
        if time.monotonic() - self._read_at > READ_INTERVAL_S:
            self.refresh()

    def refresh(self) -> None:
        """Read in the store which generation is requested."""
        self._read_at = time.monotonic()
        key = f"{self.key}/requested"
        value = self._store.get(key)
        published = self._refusals.checked(key, value, read_number(value)) or 0
        if published < self.requested:
            # Our request went to a store that has died, or somebody wrote over it.
            self.request(self.requested)
        self.requested = max(self.requested, published)

    def mark_present(self, generation: int) -> None:
        self._store.set(f"{self.key}/{generation}/present/{self.rank}", "1")

    def republish(self, generation: int, members: list[int]) -> None:
        """Publish our members in a store that may be new. If others agreed on other members, request the next."""
        ours = json.dumps(members)
        stored = self._store.compare_set(f"{self.key}/{generation}/members", ours)
        self.request(generation if stored is None or stored == ours.encode() else generation + 1)

    def agree(self, generation: int, gone: Callable[[int], bool], check: Callable[[], None]) -> list[int]:
        """Return the members of ``generation``; empty if a later one is requested meanwhile.

        ``gone(rank)``: that worker is not waited for. ``check()`` is called again and again, and raises if there is no
        use in waiting for the others.
        """
        name, polls = f"{self.key}/{generation}", group_builder.poll_intervals()
        while True:
            # First: a worker that comes back must not take the members of a generation that began without it.
            check()
            self.mark_present(generation)
            published = self._store.get(f"{name}/members")
            if published is None:
                marks = self._store.get_all([f"{name}/present/{rank}" for rank in self.everybody])
                present = [rank for rank, mark in zip(self.everybody, marks, strict=True) if mark is not None]
                if all(rank in present or gone(rank) for rank in self.everybody):
                    # Some may have died, or ended their training, after they were present.
                    there = [rank for rank in present if not gone(rank)]
                    if self.rank == there[0]:
                        published = self._store.compare_set(f"{name}/members", json.dumps(there))
            if published is not None:
                members = read_ranks(published, self.everybody)
                if self._refusals.checked(f"{name}/members", published, members) is not None:
                    return list(members or ())
                self.request(generation + 1)
            self.refresh()
            if self.requested > generation:
                return []
            time.sleep(next(polls))
