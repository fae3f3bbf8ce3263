"""The handshake: before workers connect, they compare what has to be the same on all of them (``join_facts``).

Each worker publishes the digest of its facts in the store, and the facts themselves under their digest, so equal facts
are in the store once. The first worker to see all others there, dead or too late publishes the *verdict*: the digest
that all agree on, or the line that every worker raises. A worker that finds a verdict comes to a run that has begun, or
failed: it compares itself with that, and if it differs, only this worker fails.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from gossamer.errors import InputError
from gossamer.process.events import EventKind, Events
from gossamer.process.joining import join_facts
from gossamer.process.joining.join_facts import Facts, name_ranks
from gossamer.process.liveness.heartbeats import Heartbeats, HeartbeatThreads
from gossamer.process.replica.agreement import Agreement
from gossamer.process.roster.roster import MAX_RANKS, KnownRoster, Roster
from gossamer.process.store.addresses import local_address
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.parsing import Refusals, read_json, read_number
from gossamer.process.store.rank_info import RankInfo
from gossamer.process.store.worker_addresses import WorkerAddresses

POLL_S = 0.02
VERDICT_WAIT_S = 0.25
"""How long a worker that waits for the verdict waits in one request."""

LOOK_S = 0.3
"""How often a worker that waits looks who is missing, and whether they live."""

GRACE_S = 2.0
"""How long workers that differ wait for the rest, so that the line names all ranks."""

SAY_AFTER_S = 5.0
"""A wait that lasts longer than this is said; again after twice as long."""

REFUSE_TIMEOUT_S = 8.0
"""How long a worker that cannot join tries to tell the others."""

LINGER_S = 3.0
"""How long the host of the store waits for the others to read why the start failed."""


class Verdict(NamedTuple):
    agreed: str = ""
    """The digest of the facts of all workers."""
    failed: str = ""
    """The line that every worker raises."""


class Handshake:
    """One worker's part in the handshake."""

    def __init__(
        self,
        rank: int,
        workers: int,
        facts: Facts,
        store: FailoverStore,
        heartbeats: Heartbeats,
        timeout_s: float,
        events: Events,
    ) -> None:
        self.rank, self.workers, self.facts, self.store = rank, workers, facts, store
        self.heartbeats, self.timeout_s, self.events = heartbeats, timeout_s, events
        self.replica: Agreement | None = None
        """If this worker is a rank of a replica: how it hears that another rank of it was refused."""
        self._text = join_facts.to_text(facts)
        self._digest = join_facts.digest_of(self._text)

    def check_run(self) -> bool:
        """Return whether the run has begun already. InputError if this worker does not fit it. Publishes nothing."""
        verdict = self._verdict()
        if verdict is None:
            return False
        self._obey(verdict)
        return True

    def publish(self) -> None:
        """Publish the facts of this worker. The store may be a new one."""
        self._publish_facts()
        first = self.store.compare_set("handshake/first", self._digest)
        if first is not None and first.decode(errors="replace") != self._digest:
            # Before the entry of this rank: whoever sees that all are there also sees that they differ.
            self.store.compare_set("handshake/differs", str(self.rank))
        self.store.set(f"handshake/rank/{self.rank}", self._digest)

    def republish_agreed(self) -> None:
        """Publish in a store that may be new what the run agreed on: workers that come back compare with it."""
        self._publish_facts()
        self.store.set("handshake/verdict", json.dumps(Verdict(agreed=self._digest)._asdict()))

    def _publish_facts(self) -> None:
        if not self.store.has_all([f"handshake/facts/{self._digest}"]):
            self.store.set(f"handshake/facts/{self._digest}", self._text)

    def run(self) -> None:
        """Compare with all others; wait for those that are not there yet. InputError if they differ or do not come."""
        self.publish()
        wait = _Wait(self.timeout_s)
        while True:
            self.check_replica()
            verdict = self._verdict()
            if verdict is None and self._all_published():
                verdict = self._decide(set())
            if verdict is None and wait.look_due():
                verdict = self._look(wait)
            if verdict is not None:
                self._obey(verdict)
                return
            # The worker that publishes last sees all others at once, and decides. The store tells the rest: that is
            # fewer requests than asking often.
            if not self.store.has_all(["handshake/verdict"], VERDICT_WAIT_S):
                time.sleep(POLL_S)

    def check_replica(self) -> None:
        """InputError if another rank of this replica was refused: perhaps nobody will come to compare with this one."""
        if self.replica is not None and self.replica.watch.refused:
            raise InputError(self.replica.watch.refused)

    def _all_published(self) -> bool:
        return self.store.has_all([f"handshake/rank/{rank}" for rank in range(self.workers)])

    def _look(self, wait: _Wait) -> Verdict | None:
        """Look who is missing; return a verdict if there is no use in waiting for them."""
        missing = {rank for rank in range(self.workers) if self.store.get(f"handshake/rank/{rank}") is None}
        dead = {rank for rank in missing if self.heartbeats.dead(rank) and self.heartbeats.seen(rank)}
        if missing == dead:
            if dead:
                text = f"{name_ranks(sorted(dead))} died before the start: beginning without"
                self.events.add(EventKind.DIED, text, min(dead))
            return self._decide(missing)
        if self.store.get("handshake/differs") is not None and wait.grace_is_over():
            return self._decide(missing)
        if wait.is_over():
            if self.store.get(f"handshake/rank/{self.rank}") is None:
                raise InputError(
                    f"the store that worker {self.rank} joined does not answer any more, and no other does: "
                    "look at the output of worker 0, and start all workers again"
                )
            return self._publish_verdict(Verdict(failed=self._did_not_come(missing - dead, dead)))
        if wait.saying_due():
            text = f"waiting for {name_ranks(sorted(missing))} of {self.workers} workers to join"
            self.events.add(EventKind.WAITING, text)
        return None

    def _did_not_come(self, missing: set[int], dead: set[int]) -> str:
        # Without the worker that hosted the store, others may not have found one.
        died = f", and {name_ranks(sorted(dead))} died" if dead else ""
        return (
            f"{name_ranks(sorted(missing))} of {self.workers} workers did not join within {self.timeout_s:.0f} s{died}"
            ": look at their output and start all workers, or give join a longer timeout"
        )

    def _decide(self, missing: set[int]) -> Verdict | None:
        """Compare all facts that are there and publish what follows."""
        differs = self.store.get("handshake/differs")
        if differs is None:
            return self._publish_verdict(Verdict(agreed=self._digest))
        # What is no rank tells nothing: then only those that began are compared.
        number = read_number(differs)
        ranks = {*range(self.workers), self.rank, self.rank if number is None or number >= MAX_RANKS else number}
        sides: dict[int, Facts] = {}
        for rank in sorted(ranks - missing):
            digest = self.store.get(f"handshake/rank/{rank}")
            if digest is None:
                continue
            facts = self._facts(digest.decode(errors="replace"))
            if facts is None and self.store.get(f"handshake/rank/{rank}") != digest:
                # The store has ended meanwhile: in the next one they publish again.
                return None
            if facts is None:
                text = f"what worker {rank} published cannot be read: install the same version of gossamer on all"
                return self._publish_verdict(Verdict(failed=text))
            sides[rank] = facts
        line = join_facts.difference(sides)
        if line is None:
            # The worker that differed has died, and another process of its rank has come.
            return self._publish_verdict(Verdict(agreed=self._digest))
        if missing:
            line += f" ({name_ranks(sorted(missing))} had not come yet)"
        return self._publish_verdict(Verdict(failed=line))

    def _facts(self, digest: str) -> Facts | None:
        if digest == self._digest:
            return self.facts
        text = self.store.get(f"handshake/facts/{digest}")
        return None if text is None else join_facts.from_text(text)

    # The verdict

    def _verdict(self) -> Verdict | None:
        text = self.store.get("handshake/verdict")
        return None if text is None else _parse_verdict(text)

    def _publish_verdict(self, verdict: Verdict) -> Verdict | None:
        """Return the verdict that counts: the first one. None if no store can be reached."""
        text = self.store.compare_set("handshake/verdict", json.dumps(verdict._asdict()))
        return None if text is None else _parse_verdict(text)

    def _obey(self, verdict: Verdict) -> None:
        if verdict.failed:
            self._stay_until_read()
            raise InputError(verdict.failed)
        if verdict.agreed == self._digest:
            return
        run = self._facts(verdict.agreed)
        raise InputError(join_facts.difference_from_run(self.facts, run or {}, self.rank))

    def _stay_until_read(self) -> None:
        """If this process hosts the store, stay until the others have read the verdict."""
        self.store.set(f"handshake/read/{self.rank}", "1")
        if not self.store.hosted_here:
            return
        until = time.monotonic() + LINGER_S
        there = [rank for rank in range(self.workers) if self.store.get(f"handshake/rank/{rank}") is not None]
        while time.monotonic() < until and not self.store.has_all([f"handshake/read/{rank}" for rank in there]):
            time.sleep(POLL_S)


@contextlib.contextmanager
def shaken_hands(rank_info: RankInfo, facts: Facts, timeout_s: float) -> Iterator[tuple[FailoverStore, bool]]:
    """Compare with the other workers before anything else is set up; yield the store, and whether they have begun."""
    events, rank = Events(rank_info.rank), rank_info.rank
    store = rank_info.connect_store(timeout_s, partial(events.add, EventKind.WAITING))
    listener = store.listen(local_address(rank_info.host))
    addresses = WorkerAddresses(rank, listener.address, store, Refusals(lambda text: None))
    heartbeats = Heartbeats(rank, KnownRoster(Roster(rank_info.workers)), store, addresses)
    handshake = Handshake(rank, rank_info.workers, facts, store, heartbeats, timeout_s, events)
    thread = None
    try:
        begun = handshake.check_run()
        if not begun:
            addresses.publish()
            store.on_move.append(addresses.publish)
            thread = HeartbeatThreads(heartbeats)
            handshake.run()
        yield store, begun
    finally:
        if thread is not None:
            thread.close()
        store.close()


def refuse_start(rank_info: RankInfo, why: str) -> None:
    """Tell the other workers that this one cannot join, so that they do not wait for it. A run that has begun goes on.

    If this process hosts the store, it stays for some seconds until the others have read it. InputError if there is no
    store.
    """
    if rank_info.workers == 1:
        return
    store = rank_info.connect_store(REFUSE_TIMEOUT_S)
    try:
        verdict = Verdict(failed=f"worker {rank_info.rank} cannot join: {why}")
        store.compare_set("handshake/verdict", json.dumps(verdict._asdict()))
        store.set(f"handshake/read/{rank_info.rank}", "1")
        until = time.monotonic() + REFUSE_TIMEOUT_S
        everybody = [f"handshake/read/{rank}" for rank in range(rank_info.workers)]
        while store.hosted_here and time.monotonic() < until and not store.has_all(everybody):
            time.sleep(POLL_S)
    finally:
        store.close()


class _Wait:
    """The times of one wait."""

    def __init__(self, timeout_s: float) -> None:
        self._began = self._looked = time.monotonic()
        self._timeout_s, self._say_after_s = timeout_s, SAY_AFTER_S
        self._grace_until: float | None = None

    def look_due(self) -> bool:
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        return True

    def grace_is_over(self) -> bool:
        """Return whether a difference has been known for long enough."""
        now = time.monotonic()
        self._grace_until = self._grace_until or now + GRACE_S
        return now > self._grace_until

    def is_over(self) -> bool:
        return time.monotonic() - self._began > self._timeout_s

    def saying_due(self) -> bool:
        if time.monotonic() - self._began < self._say_after_s:
            return False
        self._say_after_s *= 2
        return True


def _parse_verdict(text: bytes) -> Verdict:
    verdict = read_json(text)
    if isinstance(verdict, dict) and all(isinstance(verdict.get(name), str) for name in Verdict._fields):
        return Verdict(*(verdict[name] for name in Verdict._fields))
    return Verdict(failed="what the workers agreed on cannot be read: install the same version of gossamer on all")
