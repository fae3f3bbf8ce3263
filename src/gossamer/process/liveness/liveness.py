"""Who is alive: a state machine without threads, clocks and sockets.

Inputs are messages, times and what this worker does; outputs are actions. It is driven by ``heartbeats`` in real
workers and by ``gossamer.testing.histories`` in simulated ones. The protocol, a gossip of heartbeat counters (van
Renesse, Minsky and Hayden, 1998) with direct probes as in SWIM (Das, Gupta and Motivala, 2002):

1. Each worker counts its heartbeats in a record of its own, and sends what it knows of all workers to few neighbours.
   So a worker that others can reach is alive, even if this one cannot reach it.
2. News (a process, its end, a request) is passed on at once.
3. A worker whose counter stands still is pinged. It is dead if nothing listens at its address, if it does not answer
   either, or if it only answers for very long. What others say about it makes nobody dead.
4. Dead workers are looked for again and again: a partition heals, a stopped process goes on.

A message has at most ``MAX_RECORDS`` records besides the sender's own: of more workers those that have changed, and
others in turn. Of the rest it has the counters, at most ``MAX_COUNTERS``; of more workers a part in turn, and each
worker watches its neighbours, not all. Who finds a worker dead tells the others, and they look for themselves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gossamer.process.liveness.actions import Change, Namesake, Notice, Send
from gossamer.process.liveness.gossip_queue import MAX_RECORDS, GossipQueue
from gossamer.process.liveness.peer import MAX_PINGS, NEVER, OwnRank, Peer, Timing
from gossamer.process.liveness.reachability import Reachability
from gossamer.process.liveness.records import Kind, Message, Record, Stage, first_record
from gossamer.process.liveness.ring import Ring
from gossamer.process.net.connection import Address
from gossamer.process.store.parsing import MAX_PROCESS
from gossamer.seeds import text_stream


class Liveness:
    """What one worker knows of all."""

    def __init__(
        self,
        own: Record,
        workers: int,
        now: float,
        seed: int = 0,
        timing: Timing | None = None,
        max_records: int = MAX_RECORDS,
    ) -> None:
        self.own, self.workers, self.timing = own, workers, timing or Timing()
        self.peers = {rank: Peer(now) for rank in range(workers) if rank != own.rank}
        self.retired: set[int] = set()
        """Workers that have left for good: what is said about them is ignored."""
        self.all_seen = False
        """Every worker has been heard of: one that was not is dead, not starting."""
        self.actions: list[Send | Notice | Namesake] = []
        self.changed: set[int] = set()
        """Workers about which there is news; whoever drives this machine empties it."""
        self.reachability = Reachability(self.peers, self.timing)
        self._own_rank = OwnRank()
        self._seed = f"{seed}/{own.rank}/{own.process}"
        self._ticked_at = self._gossip_at = now
        self._watching: set[int] = set()
        self._suspects: set[int] = set()
        """Workers that may be dead, after what others say: this one looks for them itself."""
        self._lost: set[int] = set()
        self._unknown = set(self.peers)
        """Workers of which nothing is known yet."""
        self._queue = GossipQueue(self.peers, max_records)
        self._ring = Ring(own.rank)

    @cached_property
    def _rng(self) -> random.Random:
        return text_stream(self._seed)

    # What the worker does

    def beat(self, steps: int, busy_s: float) -> None:
        """Count a heartbeat; it travels with the next gossip."""
        rank, process, heartbeats, changes, stage, _, _, requests, views, address, cut = self.own
        self.own = Record(rank, process, heartbeats + 1, changes, stage, steps, busy_s, requests, views, address, cut)

    def advance(self, stage: Stage) -> None:
        """This worker is done, or leaves: tell the others at once."""
        if stage > self.own.stage:
            self._change(stage=stage)
            # All of them, unless they are many: after this one has left, nobody asks it again.
            everybody = stage >= Stage.LEFT and self._queue.fits_all
            self._send(list(self.peers) if everybody else self._ring.neighbours(), Kind.GOSSIP)

    def request(self, membership: int, number: int) -> None:
        """A view of a membership is requested: tell the others at once."""
        requests = list(self.own.requests)
        requests[membership] = number
        if self._raise_requests(requests):
            self._send(self._ring.neighbours(), Kind.GOSSIP)

    def _raise_requests(self, requests: Sequence[int]) -> bool:
        """Note what somebody requests; return whether that is new here."""
        known = self.own.requests
        raised = known if requests == known else tuple(map(max, known, requests))
        if raised == known:
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

    # Who belongs to the run

    def add(self, rank: int, now: float) -> None:
        """A worker has come that was not there at the start."""
        if rank != self.own.rank and rank not in self.retired and rank not in self.peers:
            self.peers[rank] = Peer(now)
            self._unknown.add(rank)
            self._queue.come(rank)

    def remove(self, rank: int) -> None:
        """A worker has left for good."""
        self.retired.add(rank)
        if self.peers.pop(rank, None) is not None:
            self._queue.go(rank)
            for ranks in (self._lost, self._suspects, self._watching, self._unknown):
                ranks.discard(rank)
            self._ring.set_present(rank, False)
            self.changed.add(rank)

    def _know(self, rank: int, now: float) -> bool:
        """Return whether what is said about this worker counts. It may be a new one."""
        if rank not in self.peers and rank not in self.retired and rank != self.own.rank:
            self.add(rank, now)
            self.actions.append(Notice(Change.CAME, rank))
        return rank not in self.retired

    # What is known

    def dead(self, rank: int) -> bool:
        return rank in self.peers and self.peers[rank].dead

    def record(self, rank: int) -> Record | None:
        return self.own if rank == self.own.rank else self.peers[rank].record if rank in self.peers else None

    # Messages

    def found(self, rank: int, process: int, address: Address, now: float) -> None:
        """A process of ``rank`` has published where it listens: it has been there, whether it is heard of or not."""
        if not self._know(rank, now):
            return
        peer = self.peers[rank]
        self._learn(first_record(rank, process, address), -1, now)
        # Among many it is asked only if the others do not soon tell how it is.
        asks = self._queue.fits_all or now - peer.moved_at >= self.timing.dead_s
        if peer.dead or (asks and peer.record is not None and peer.heartbeats == 0):
            self._send([rank], Kind.PING)

    def receive(self, sender: int, message: Message, now: float) -> None:
        if sender == self.own.rank or message.records[0].rank != sender or not self._know(sender, now):
            return
        peer = self.peers[sender]
        said, known = message.records[0], peer.record
        if known is not None and known.is_newer_than(said) and not known.is_same_process(said):
            # Another process of this rank had this number or a higher one: the sender has to take one above it.
            self._send([sender], Kind.GOSSIP, [sender])
            return
        if not self._queue.fits_all and (known is None or said.process > known.process):
            # A new process needs all records, and the names of the dead: gossip tells of a death only once.
            lost = [(rank, record.process) for rank in sorted(self._lost) if (record := self.peers[rank].record)]
            self._send([sender], Kind.GOSSIP, list(self.peers), found_dead=tuple(lost))
        news = [record.rank for record in message.records if self._learn(record, sender, now)]
        for counter in message.counters:
            self._count(*counter, now)
        for rank, found_dead in message.found_dead:
            self._suspect(rank, found_dead, now)
        peer.answered_at, peer.refused_at = now, NEVER
        if message.kind == Kind.PING:
            self._send([sender], Kind.PONG, counters=self._counters())
        if news:
            self._queue.note(news)
            self._pass_on(sender)
        self._judge(sender, now)

    def refused(self, rank: int, address: Address, now: float) -> None:
        """Nothing listens at this address of ``rank``."""
        peer = self.peers.get(rank)
        if peer is not None and peer.record is not None and peer.record.address == address:
            peer.refused_at = now
            self._judge(rank, now)

    def _learn(self, record: Record, sender: int, now: float) -> bool:
        """Take a record over if it is newer than what is known; return whether others have to know it at once."""
        rank = record.rank
        if rank == self.own.rank:
            # Of an earlier process of this rank, on a machine whose clock is ahead, or of one that lives too.
            if self._own_rank.is_alive(record, self.own):
                self.actions.append(Namesake(record.address))
            if raises := self._own_rank.must_raise(record, self.own, now):
                self._change(process=min(record.process + 1, MAX_PROCESS))
            return raises
        if rank not in self.peers and not self._know(rank, now):
            return False
        peer = self.peers[rank]
        before = peer.record
        if not record.is_newer_than(before):
            return False
        replaced = before is not None and record.process > before.process
        if before is None or replaced or record.changes > before.changes:
            self._queue.note_change(rank)
        # A process that hangs may still pass on what others request.
        moved = peer.take(record, now)
        self._unknown.discard(rank)
        revived = peer.dead and peer.is_revived_by(self.timing, record, speaks=rank == sender and moved, now=now)
        returned = replaced or revived
        if returned:
            peer.dead, peer.watched_from = False, now
            self._lost.discard(rank)
            self._clear(rank)
            self.actions.append(Notice(Change.RETURNED, rank))
            self.changed.add(rank)
            if not self._queue.fits_all and not replaced and rank != sender:
                # What others have heard of it may be older than its death, and nobody else may look again.
                self._look_for(rank, now)
        raised = self._raise_requests(record.requests)
        cut = before is not None and record.unreachable != before.unreachable
        if before is None or cut or record.stage != before.stage or record.views != before.views:
            self.changed.add(rank)
        if record.stage == Stage.RETIRED and (before is None or before.stage != Stage.RETIRED):
            self.actions.append(Notice(Change.RETIRED, rank))
        news = before is None or returned or record.stage != before.stage
        if news:
            self._ring.set_present(rank, peer.is_there)
        return raised or cut or news

    def _count(self, rank: int, process: int, heartbeats: int, now: float) -> None:
        """Take over how far a counter has come, if that is news. Others tell it: it is not the sender's own."""
        peer = self.peers.get(rank)
        if peer is None or peer.record is None or peer.record.process != process or heartbeats <= peer.heartbeats:
            return
        if peer.dead:
            self._learn(peer.record._replace(heartbeats=heartbeats), -1, now)
        else:
            peer.heartbeats, peer.moved_at = heartbeats, now

    def _suspect(self, rank: int, process: int, now: float) -> None:
        """Somebody has found this process dead: look for it."""
        peer = self.peers.get(rank)
        if peer is None or peer.dead or peer.record is None or peer.record.process != process or rank in self._suspects:
            return
        self._look_for(rank, now)
        self._queue.note_dead(rank, process)
        self._pass_on(rank)

    def _look_for(self, rank: int, now: float) -> None:
        self._suspects.add(rank)
        # If its counter should have moved, it has been silent for longer.
        self.peers[rank].suspected_at = self.peers[rank].moved_at if self._queue.counts_all else now
        self._send([rank], Kind.PING)

    # Time

    def tick(self, now: float) -> None:
        """Do what is due; call it every ``tick_s``."""
        late_s = now - self._ticked_at
        self._ticked_at = now
        if late_s > self.timing.paused_s:
            self._forgive(late_s, now)
        silent, near = [], self._ring.neighbours()
        # Through the hands of many workers a counter comes less evenly.
        uneven_s = 0.0 if self._queue.fits_all else self.timing.suspect_s
        for rank in self._watched(now):
            peer = self.peers[rank]
            if peer.is_progressing(self.timing, now if rank in near else now - uneven_s):
                continue
            self._judge(rank, now)
            if not peer.dead and peer.record is not None and not peer.is_progressing(self.timing, now):
                silent.append(rank)
        if silent:
            self._send(self._rng.sample(silent, min(MAX_PINGS, len(silent))), Kind.PING)
        self._send(self.reachability.tick(now), Kind.PING)
        if self.reachability.unreachable != self.own.unreachable:
            self._change(unreachable=self.reachability.unreachable)
            self.changed.add(self.own.rank)
        if self._queue.begin_tick():
            self._pass_on(None)
        if now >= self._gossip_at:
            self._gossip_at = now + self.timing.gossip_s
            about = self._queue.next_records()
            self._send(self._ring.neighbours(), Kind.GOSSIP, about, counters=self._counters(about))
            if self._lost:
                self._send([self._rng.choice(sorted(self._lost))], Kind.PING, counters=self._counters())

    def _watched(self, now: float) -> list[int]:
        """Return the workers whose counters should move, or that others have found dead."""
        for rank in list(self._suspects):
            peer = self.peers[rank]
            # What others have heard of it may be older than its death.
            if min(peer.answered_at, peer.moved_at) > peer.suspected_at:
                self._clear(rank)
        if self._queue.counts_all:
            return [rank for rank, peer in self.peers.items() if not peer.dead]
        watched = {*self._ring.neighbours(), *self._suspects, *self._unknown}
        for rank in watched - self._watching:
            self.peers[rank].watched_from = now if rank not in self._suspects else NEVER
        self._watching = watched
        return sorted(rank for rank in watched if not self.peers[rank].dead)

    def _clear(self, rank: int) -> None:
        self._suspects.discard(rank)
        self.peers[rank].suspected_at = NEVER

    def _forgive(self, late_s: float, now: float) -> None:
        """This process stood still: the others were not silent, it did not listen."""
        for peer in self.peers.values():
            peer.moved_at, peer.answered_at = (min(now, at + late_s) for at in (peer.moved_at, peer.answered_at))

    def _judge(self, rank: int, now: float) -> None:
        peer = self.peers[rank]
        if not peer.dead and self._is_dead(peer, now):
            peer.dead, peer.died_at, peer.last_heartbeats = True, now, None
            self.actions.append(Notice(Change.DIED, rank))
            self.changed.add(rank)
            self._lost.add(rank)
            self._ring.set_present(rank, peer.is_there)
            if not self._queue.fits_all and peer.record is not None and rank not in self._suspects:
                self._queue.note_dead(rank, peer.record.process)
                self._pass_on(rank)
            self._clear(rank)

    def _is_dead(self, peer: Peer, now: float) -> bool:
        # If this process stood still, the others were not silent: the next tick says for how long.
        return now - self._ticked_at <= self.timing.paused_s and peer.is_dead(self.timing, now, self.all_seen)

    # Sending

    def _pass_on(self, sender: int | None) -> None:
        """Tell the neighbours what is new about others."""
        taken = self._queue.take()
        if taken is not None:
            neighbours = [rank for rank in self._ring.neighbours() if rank != sender]
            self._send(neighbours, Kind.GOSSIP, taken[0], found_dead=taken[1])

    def _counters(self, besides: Sequence[int] = ()) -> tuple[tuple[int, int, int], ...]:
        """For the neighbours, and for one that takes others for dead, or is taken for it: nobody else tells it."""
        if self._queue.fits_all:
            return ()
        counted = ((rank, self.peers[rank]) for rank in self._queue.next_counters() if rank not in besides)
        alive = ((rank, peer.record, peer) for rank, peer in counted if not peer.dead)
        return tuple((rank, record.process, peer.heartbeats) for rank, record, peer in alive if record is not None)

    def _send(self, ranks: Sequence[int], kind: Kind, about: Sequence[int] = (), **more: Any) -> None:
        """Send a message with all records; of many workers, only with those ``about`` some of them."""
        if not ranks:
            return
        others = (self.peers[rank] for rank in (self.peers if self._queue.fits_all else about) if rank != self.own.rank)
        known = [record for peer in others if (record := peer.newest_record) is not None]
        max_records = self._queue.max_records
        for at in range(0, max(len(known), 1), max_records):
            message = Message(kind, (self.own, *known[at : at + max_records]), **more)
            self.actions.append(Send(ranks, message))
