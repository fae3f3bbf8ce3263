"""Who is alive: a state machine without threads, clocks and sockets.

Inputs are messages, times and what this worker does; outputs are actions. It is driven by ``heartbeats`` in real
workers and by ``gossamer.testing.histories`` in simulated ones. The protocol, a gossip of heartbeat counters (van
Renesse, Minsky and Hayden, 1998) with direct probes as in SWIM (Das, Gupta and Motivala, 2002):

1. Each worker counts its heartbeats in a record of its own, and sends all records that it knows to few neighbours. So a
   worker that others can reach is alive, even if this one cannot reach it.
2. News (a process, its end, a request) is passed on at once.
3. A worker whose counter stands still is pinged. It is dead if nothing listens at its address, if it does not answer
   either, or if it only answers for very long. What others say about it makes nobody dead.
4. Dead workers are looked for again and again: a partition heals, a stopped process goes on.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gossamer.process.liveness.records import NUM_MEMBERSHIPS, Kind, Message, Record, Stage
from gossamer.process.net.connection import Address

NEVER = float("-inf")
MAX_PINGS = 4
"""Silent workers that are pinged at a time: if this worker has been slow, all seem to be silent."""

MAX_RECORDS = 512
"""In one message."""

ALIVE_COUNTS = 5
"""A dead worker that others have heard of is alive again if its counter has moved this far: less may have been on its
way when it died."""


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
    paused_s: float = 1.0
    """A tick that is later than this shows that this process stood still: it could not have heard anything."""


class Send(NamedTuple):
    """Send a message. It may be lost or late."""

    rank: int
    message: Message


class Change(StrEnum):
    DIED = "died"
    RETURNED = "returned"
    """It is alive again, or another process is in its place."""


class Notice(NamedTuple):
    change: Change
    rank: int


class Peer:
    """What is known about another worker."""

    def __init__(self, now: float) -> None:
        self.record: Record | None = None
        self.moved_at = now
        """When its counter last moved, as far as is known here."""
        self.answered_at = NEVER
        """When a message last came from itself."""
        self.refused_at = NEVER
        """When nothing listened at its address."""
        self.dead = False
        self.last_heartbeats = 0
        """Its counter when it died."""


class Liveness:
    """What one worker knows of all."""

    def __init__(self, own: Record, workers: int, now: float, seed: int = 0, timing: Timing | None = None) -> None:
        self.own, self.workers, self.timing = own, workers, timing or Timing()
        self.peers = {rank: Peer(now) for rank in range(workers) if rank != own.rank}
        self.all_seen = False
        """Every worker has been heard of: one that was not is dead, not starting."""
        self.actions: list[Send | Notice] = []
        self.changed: set[int] = set()
        """Workers about which there is news; whoever drives this machine empties it."""
        self._rng = random.Random(f"{seed}/{own.rank}/{own.process}")
        self._ticked_at = now
        self._gossip_at = now

    # What the worker does

    def beat(self, steps: int, busy_s: float) -> None:
        """Count a heartbeat; it travels with the next gossip."""
        self.own = self.own._replace(heartbeats=self.own.heartbeats + 1, steps=steps, busy_s=busy_s)

    def advance(self, stage: Stage) -> None:
        """This worker is done, or leaves: tell the others at once."""
        if stage > self.own.stage:
            self._change(stage=stage)
            # All of them: after this one has left, nobody asks it again.
            self._gossip(self.peers if stage == Stage.LEFT else self.neighbours())

    def request(self, membership: int, number: int) -> None:
        """A view of a membership is requested: tell the others at once."""
        requests = list(self.own.requests)
        requests[membership] = number
        if self._raise_requests(requests):
            self._gossip(self.neighbours())

    def _raise_requests(self, requests: Sequence[int]) -> bool:
        """Note what somebody requests; return whether that is new here."""
        raised = tuple(map(max, self.own.requests, requests))
        if raised == self.own.requests:
            return False
        self._change(requests=raised)
        self.changed.add(self.own.rank)
        return True

    def enter(self, membership: int, mark: int) -> None:
        """This worker is in another view of a membership; it travels with the next gossip."""
        views = list(self.own.views)
        views[membership] = mark
        self._change(views=tuple(views))

    def _change(self, **fields: object) -> None:
        self.own = self.own._replace(changes=self.own.changes + 1, **fields)  # type: ignore[arg-type]

    # What is known

    def dead(self, rank: int) -> bool:
        return rank != self.own.rank and self.peers[rank].dead

    def record(self, rank: int) -> Record | None:
        return self.own if rank == self.own.rank else self.peers[rank].record

    def neighbours(self) -> list[int]:
        """Return the workers that this one tells what it knows: few, in a ring of those that are there, and across it.

        Both ends of such a pair send. So news reaches n workers in about √n / 2 messages one after the other.
        """
        there = [self.own.rank, *(rank for rank, peer in self.peers.items() if peer.record and not self._gone(rank))]
        ring = sorted(there)
        at, size = ring.index(self.own.rank), len(ring)
        across = max(2, round(size**0.5))
        found = {ring[(at + offset) % size] for offset in (-across, -1, 1, across)}
        return sorted(found - {self.own.rank})

    def _gone(self, rank: int) -> bool:
        peer = self.peers[rank]
        return peer.dead or (peer.record is not None and peer.record.stage == Stage.LEFT)

    # Messages

    def found(self, rank: int, process: int, address: Address, now: float) -> None:
        """A process of ``rank`` has published where it listens: it has been there, whether it is heard of or not."""
        peer = self.peers[rank]
        self._learn(first_record(rank, process, address), -1, now)
        if peer.dead or (peer.record is not None and peer.record.heartbeats == 0):
            self._send(rank, Kind.PING)

    def receive(self, sender: int, message: Message, now: float) -> None:
        peer = self.peers.get(sender)
        if peer is None or message.records[0].rank != sender:
            return
        process = message.records[0].process
        if peer.record is not None and process < peer.record.process:
            # Another process of this rank had a higher number: the sender has to take one that is higher still.
            self._send(sender, Kind.GOSSIP)
            return
        news = False
        for record in message.records:
            news = self._learn(record, sender, now) or news
        peer.answered_at, peer.refused_at = now, NEVER
        if message.kind == Kind.PING:
            self._send(sender, Kind.PONG)
        if news:
            self._gossip(rank for rank in self.neighbours() if rank != sender)
        self._judge(sender, now)

    def refused(self, rank: int, address: Address, now: float) -> None:
        """Nothing listens at this address of ``rank``."""
        peer = self.peers[rank]
        if peer.record is not None and peer.record.address == address:
            peer.refused_at = now
            self._judge(rank, now)

    def _learn(self, record: Record, sender: int, now: float) -> bool:
        """Take a record over if it is newer than what is known; return whether others have to know it at once."""
        if record.rank == self.own.rank:
            if record.process > self.own.process:
                # Of an earlier process of this rank, on a machine whose clock is ahead.
                self._change(process=record.process + 1)
                return True
            return False
        peer = self.peers[record.rank]
        before = peer.record
        if not record.is_newer_than(before):
            return False
        replaced = before is not None and record.process > before.process
        # A process that hangs may still pass on what others request.
        moved = before is None or replaced or record.heartbeats > before.heartbeats
        peer.record = record
        if moved:
            peer.moved_at = now
        if replaced:
            peer.answered_at = peer.refused_at = NEVER
        if peer.dead and before is not None and before.heartbeats == 0:
            # Only its address was known: what others have heard of it may be older than its death.
            peer.last_heartbeats = record.heartbeats
        lives = (record.rank == sender and moved) or record.heartbeats >= peer.last_heartbeats + ALIVE_COUNTS
        if replaced or (peer.dead and lives):
            peer.dead = False
            self.actions.append(Notice(Change.RETURNED, record.rank))
            self.changed.add(record.rank)
        raised = self._raise_requests(record.requests)
        if before is None or (record.stage, record.views) != (before.stage, before.views):
            self.changed.add(record.rank)
        return raised or before is None or replaced or record.stage != before.stage

    # Time

    def tick(self, now: float) -> None:
        """Do what is due; call it every ``tick_s``."""
        late_s = now - self._ticked_at
        self._ticked_at = now
        if late_s > self.timing.paused_s:
            self._forgive(late_s, now)
        for rank in self.peers:
            self._judge(rank, now)
        silent = [rank for rank, peer in self.peers.items() if self._is_silent(peer, now) and not peer.dead]
        for rank in self._rng.sample(silent, min(MAX_PINGS, len(silent))):
            self._send(rank, Kind.PING)
        if now >= self._gossip_at:
            self._gossip_at = now + self.timing.gossip_s
            self._gossip(self.neighbours())
            lost = [rank for rank, peer in self.peers.items() if peer.dead]
            if lost:
                self._send(self._rng.choice(lost), Kind.PING)

    def _forgive(self, late_s: float, now: float) -> None:
        """This process stood still: the others were not silent, it did not listen."""
        for peer in self.peers.values():
            peer.moved_at = min(now, peer.moved_at + late_s)
            peer.answered_at = min(now, peer.answered_at + late_s)

    def _is_silent(self, peer: Peer, now: float) -> bool:
        return peer.record is not None and now - peer.moved_at >= self.timing.suspect_s

    def _judge(self, rank: int, now: float) -> None:
        peer = self.peers[rank]
        if not peer.dead and self._is_dead(peer, now):
            peer.dead, peer.last_heartbeats = True, peer.record.heartbeats if peer.record else 0
            self.actions.append(Notice(Change.DIED, rank))
            self.changed.add(rank)

    def _is_dead(self, peer: Peer, now: float) -> bool:
        timing, silent_s = self.timing, now - peer.moved_at
        if peer.record is None and not self.all_seen:
            return silent_s > timing.first_s
        if silent_s < timing.suspect_s:
            return False
        if peer.refused_at > peer.moved_at or silent_s > timing.hung_s:
            return True
        return now - max(peer.moved_at, peer.answered_at) > timing.dead_s

    # Sending

    def _gossip(self, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            self._send(rank, Kind.GOSSIP)

    def _send(self, rank: int, kind: Kind) -> None:
        known = [peer.record for peer in self.peers.values() if peer.record is not None]
        for at in range(0, max(len(known), 1), MAX_RECORDS):
            self.actions.append(Send(rank, Message(kind, (self.own, *known[at : at + MAX_RECORDS]))))


def first_record(rank: int, process: int, address: Address) -> Record:
    """Return what a process says about itself when it starts."""
    return Record(rank, process, 0, 0, Stage.TRAINING, 0, 0.0, (0,) * NUM_MEMBERSHIPS, (0,) * NUM_MEMBERSHIPS, address)
