"""Heartbeats: which workers are alive, how far they are and what they request, as one of them knows it.

The decisions are in ``liveness``, a state machine; here are its surroundings: the messages of real workers, the clock,
and the *board*, entries of the store that tell a worker that comes back where the others listen and who has left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gossamer.process.liveness.actions import Change, Namesake, Notice, Send
from gossamer.process.liveness.board import BOARD_INTERVAL_S, BOARD_WORKERS, read_stage
from gossamer.process.liveness.liveness import Liveness
from gossamer.process.liveness.records import Stage, first_record, from_bytes, to_bytes
from gossamer.process.net.connection import Address
from gossamer.process.net.messenger import Messenger
from gossamer.process.roster.roster import MAX_RANKS, KnownRoster, Roster
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.parsing import is_plausible
from gossamer.process.store.worker_addresses import WorkerAddresses

HEARTBEAT_INTERVAL_S = 0.1


class Progress(NamedTuple):
    """How far a worker is."""

    steps: int
    busy_s: float
    """Time of these steps without waits for other workers."""


class Heartbeats:
    """The heartbeats of all workers, as seen by one of them."""

    def __init__(self, rank: int, everybody: KnownRoster, store: FailoverStore, addresses: WorkerAddresses) -> None:
        """``everybody``: who belongs to the run; whoever is heard of is added. ``store``: listens already."""
        assert store.listener is not None
        self.rank, self.everybody, self.store, self._addresses = rank, everybody, store, addresses
        self._refusals = addresses.refusals
        # In microseconds: a process that is started again has a higher number.
        self.process = time.time_ns() // 1000
        own = first_record(rank, self.process, store.listener.address)
        self._liveness = Liveness(own, everybody.value.first, time.monotonic())
        self.loop = store.listener.loop
        self.messenger = Messenger(
            store.listener, store.identity, self._on_message, self._on_refused, about=store.prefix.encode()[-256:]
        )
        self._started = False
        self.muted = False
        """This process has no place among the workers any more: it says nothing."""
        self._published = False
        """Which process listens at our address is on the board: the others look for it."""
        self._board: dict[int, tuple[Stage, int]] = {}
        """The stage that each worker has published, and by which process."""
        self._board_read_at = float("-inf")
        self._notices: deque[Notice] = deque()
        self._saying = threading.Lock()
        self.lost: frozenset[int] = frozenset()
        """Workers that are dead."""
        self.own_progress: Callable[[], Progress] = lambda: Progress(0, 0.0)
        self.on_death: Callable[[int], None] = lambda rank: None
        """Called once when a worker is dead, by ``say_notices``."""
        self.on_return: Callable[[int], None] = lambda rank: None
        """Called once when a dead worker is there again, or a new process in its place."""
        self.handlers: dict[int, Callable[[int, bytes], None]] = {}
        """Take messages that are none of heartbeats, by their first byte. They and the following are called in the
        thread of the loop."""
        self.on_change: Callable[[Liveness, set[int]], None] = lambda liveness, ranks: None
        """Called when there is news about some workers."""
        self.on_tick: Callable[[float], None] = lambda now: None
        self.on_namesake: Callable[[Address], None] = lambda address: None
        """Called when another live process of this worker's rank is heard of, which listens at ``address``."""
        store.unreachable = lambda: self.lost.union(self._liveness.own.unreachable)
        self._follow_roster(everybody.value, self._liveness)
        everybody.on_change.append(lambda before, after: self._do(partial(self._follow_roster, after)))

    # From any thread but that of the loop

    def beat(self) -> None:
        """Count a heartbeat; waits for nobody."""
        steps, busy_s = self.own_progress()
        self._do(lambda liveness: liveness.beat(steps, busy_s))
        if not self._started:
            self._started = True
            self.loop.call_soon(self._tick)

    def follow(self) -> None:
        """Read the board if that is due, and say what has become of the others. Waits for the store."""
        now = time.monotonic()
        if now - self._board_read_at > BOARD_INTERVAL_S * max(1.0, len(self.everybody) / BOARD_WORKERS):
            self._board_read_at = now
            self._read_board()
            if not self._published or self._liveness.own.stage > Stage.TRAINING:
                # Again and again at the end: the store may be another one by now.
                self._publish(self._liveness.own.stage)
        self.say_notices()

    def look_again(self) -> None:
        """Read the board with the next call of ``follow``: the store may be another one, or others may have come."""
        self._board_read_at = float("-inf")

    def publish_done(self, done: bool) -> None:
        """Tell the others whether this worker has ended its training."""
        self._publish(Stage.DONE if done else Stage.TRAINING)

    def publish_left(self) -> None:
        """Tell the others that this worker leaves in order: they shall not take it for dead."""
        self._publish(Stage.LEFT)

    def publish_retired(self) -> None:
        """Tell the others that this worker leaves for good."""
        self._publish(Stage.RETIRED)

    def _publish(self, stage: Stage) -> None:
        if self.muted:
            # The rank is another process's: what is published about it is not this one's to say.
            return
        self._do(lambda liveness: liveness.advance(stage))
        # For those that come later, and those that no message reaches in time.
        own = self._liveness.own
        self.store.set(f"done/{self.rank}", f"{max(stage, own.stage):d} {own.process}")
        self._published = True

    def done(self, rank: int) -> bool:
        return self._stage(rank) >= Stage.DONE

    def left(self, rank: int) -> bool:
        if self._stage(rank) < Stage.LEFT:
            self._read_board()
        return self._stage(rank) >= Stage.LEFT

    def has_left(self, rank: int) -> bool:
        """Return whether that worker says that it has left; unlike ``left``, without asking the store."""
        return self._stage(rank) >= Stage.LEFT

    def dead(self, rank: int) -> bool:
        """Return whether that worker is dead."""
        return rank in self.lost

    def probe(self, ranks: Sequence[int]) -> None:
        """This worker waits for these: probe the links to them."""
        self._do(lambda liveness: liveness.reachability.probe(ranks, time.monotonic()))

    def seen(self, rank: int) -> bool:
        """Return whether a heartbeat of ``rank`` has ever been seen here."""
        return self._liveness.record(rank) is not None

    def counter(self, rank: int, address: Address) -> int | None:
        """Return the heartbeats of the process of ``rank`` that listens at ``address``, so far.

        None if it is dead, has no place among the workers any more, or nothing is known of it.
        """
        record = self._liveness.record(rank)
        if record is None or record.address != address or rank in self.lost or (rank == self.rank and self.muted):
            return None
        return record.heartbeats if rank == self.rank else self._liveness.peers[rank].heartbeats

    @property
    def all_seen(self) -> bool:
        """Every worker has been seen: one without a heartbeat is dead, not starting."""
        return self._liveness.all_seen

    @all_seen.setter
    def all_seen(self, value: bool) -> None:
        self._liveness.all_seen = value

    @property
    def progress(self) -> dict[int, Progress]:
        """How far each other worker is, as it said last."""
        records = [peer.record for peer in list(self._liveness.peers.values())]
        return {record.rank: Progress(record.steps, record.busy_s) for record in records if record is not None}

    def _stage(self, rank: int) -> Stage:
        record = self._liveness.record(rank)
        published, process = self._board.get(rank, (Stage.TRAINING, 0))
        if record is None:
            return published
        return max(record.stage, published) if process >= record.process else record.stage

    def _read_board(self) -> None:
        others = [rank for rank in self.everybody if rank != self.rank]
        addresses = self._addresses.read(others, [f"done/{rank}" for rank in others])
        for rank, (address, published) in zip(others, addresses, strict=True):
            key = f"done/{rank}"
            stage = self._refusals.checked(key, published, read_stage(published))
            if stage is not None:
                self._board[rank] = stage
            if address is not None and stage is not None:
                self._do(partial(self._find, rank, stage[1], address))

    def say_notices(self) -> None:
        """Say what has become of the others, before this returns. May wait for the store."""
        # One thread at a time, so that they are said in their order.
        with self._saying:
            while self._notices:
                notice = self._notices.popleft()
                (self.on_death if notice.change == Change.DIED else self.on_return)(notice.rank)

    def _do(self, action: Callable[[Liveness], None]) -> None:
        """Do something in the thread of the loop, then what follows from it."""
        self.loop.call_soon(lambda: self.act(action))

    # In the thread of the loop

    def act(self, action: Callable[[Liveness], None]) -> None:
        action(self._liveness)
        self._carry_out()

    def _follow_roster(self, roster: Roster, liveness: Liveness) -> None:
        now = time.monotonic()
        for rank in roster.ranks:
            liveness.add(rank, now)
        for rank in roster.left - {self.rank}:
            liveness.remove(rank)
        self.lost -= roster.left

    def _tick(self) -> None:
        self.loop.call_later(self._liveness.timing.tick_s, self._tick)
        now = time.monotonic()
        self._liveness.tick(now)
        self._carry_out()
        self.on_tick(now)

    def _on_message(self, sender: int, data: bytes) -> None:
        handler = self.handlers.get(data[0]) if data else None
        if handler is not None:
            handler(sender, data)
            return
        message = from_bytes(data, MAX_RANKS)
        if message is None:
            self._refusals.refuse(f"a message of worker {sender}", f"refused a message of worker {sender}")
            return
        requested = self._liveness.own.requests
        for requests in {record.requests for record in message.records} - {requested}:
            if not all(map(is_plausible, requests, requested)):
                text = f"refused the number of a view in a message of worker {sender}"
                self._refusals.refuse(f"views of worker {sender}", text)
                return
        self._liveness.receive(sender, message, time.monotonic())
        self._carry_out()
        for rank in {record.rank for record in message.records} - {self.rank}:
            known = self._liveness.record(rank)
            # Where a dead one was is no news: another process of it may have published its address.
            if known is not None and rank not in self.lost:
                self._addresses.note(rank, known.address)

    def _on_refused(self, rank: int, address: Address) -> None:
        self._liveness.refused(rank, address, time.monotonic())
        self._carry_out()

    def _find(self, rank: int, process: int, address: Address, liveness: Liveness) -> None:
        """Take an address from the board, unless the worker itself says where it is."""
        record = liveness.record(rank)
        if record is None or rank in self.lost or process > record.process:
            self._addresses.note(rank, address)
            self.messenger.set_address(rank, address)
            liveness.found(rank, process, address, time.monotonic())

    def _carry_out(self) -> None:
        actions, self._liveness.actions = self._liveness.actions, []
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Namesake):
                self.on_namesake(action.address)
            elif action.change == Change.CAME:
                self.everybody.learn_came([action.rank])
            elif action.change == Change.RETIRED:
                self.everybody.learn_left(action.rank)
            else:
                lost = {action.rank}
                self.lost = self.lost | lost if action.change == Change.DIED else self.lost - lost
                self._notices.append(action)
                if action.change == Change.DIED:
                    # What was sent there may be on its way for long, even once it can be reached again.
                    self.messenger.disconnect(action.rank)
        changed, self._liveness.changed = self._liveness.changed, set()
        if changed:
            self.on_change(self._liveness, changed)

    def _send(self, action: Send) -> None:
        if self._started:
            data = to_bytes(*action.message)
            for rank in action.ranks:
                self.send(rank, data)

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to another worker; it may be lost."""
        if self.muted:
            return
        record = self._liveness.record(rank)
        if record is not None and rank not in self.lost:
            self.messenger.set_address(rank, record.address)
        self.messenger.send(rank, message)


class HeartbeatThreads:
    """Two daemon threads: one counts heartbeats and calls ``poll`` after each, one calls ``follow``.

    The second may wait for a store that cannot be reached. The heartbeats go on meanwhile: this worker is alive.
    """

    def __init__(
        self,
        heartbeats: Heartbeats,
        poll: Callable[[], None] = lambda: None,
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        """``poll`` must not wait for anybody; ``follow`` may wait for the store."""
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=calls, name=name, daemon=True)
            for name, *calls in (
                ("gossamer-heartbeat", heartbeats.beat, poll),
                ("gossamer-follow", heartbeats.follow, follow),
            )
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, *calls: Callable[[], None]) -> None:
        while True:
            # A store or a connection that fails now is tried again at the next heartbeat.
            with contextlib.suppress(RuntimeError):
                for call in calls:
                    call()
            if self._closed.wait(HEARTBEAT_INTERVAL_S):
                return

    def close(self, timeout_s: float = 2 * HEARTBEAT_INTERVAL_S + 1) -> None:
        """Stop after the calls in progress; wait for them at most ``timeout_s``."""
        self._closed.set()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
