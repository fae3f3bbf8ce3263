"""Members of a view tell each other what they need to meet by messages, whatever store each of them uses."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gossamer.process.collectives.member_entries import (
    MAX_ENTRY_BYTES,
    MAX_KEYS,
    EntryKind,
    EntryMessage,
    MemberEntries,
    from_bytes,
    to_bytes,
)
from gossamer.process.liveness.heartbeats import Heartbeats, HeartbeatThreads
from gossamer.process.liveness.records import Stage
from gossamer.process.net.identity import Identity
from gossamer.process.roster.roster import KnownRoster, Roster
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host, HostedStore
from gossamer.process.store.parsing import Refusals
from gossamer.process.store.worker_addresses import WorkerAddresses

HOST, MEMBERS = "127.0.0.1", (0, 1, 2)


class Worker:
    """A worker that only beats, at a store of its own."""

    def __init__(self, rank: int) -> None:
        self.home = HostedStore(HOST, 0, Identity(), print)
        self.store = FailoverStore(Home(HOST, self.home.address[1], Host.LAUNCHER, ""), Identity(rank), "test/", 20.0)
        self.lines: list[str] = []
        refusals = Refusals(self.lines.append)
        listener = self.store.listen(HOST)
        addresses = WorkerAddresses(rank, listener.address, self.store, refusals)
        self.heartbeats = Heartbeats(rank, KnownRoster(Roster(len(MEMBERS))), self.store, addresses)
        self.entries = MemberEntries(self.heartbeats, refusals)

    def beat(self) -> None:
        self.thread = HeartbeatThreads(self.heartbeats)

    def await_all(self, key: str, entry: str, within_s: float = 60.0) -> dict[int, bytes]:
        until = time.monotonic() + within_s
        return self.entries.await_all(key, entry, MEMBERS, lambda awaited: time.monotonic() > until)

    def close(self) -> None:
        self.thread.close()
        self.store.close()
        self.home.listener.close()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker(rank) for rank in MEMBERS]
    for worker in made:
        for other in made:
            assert other.store.listener is not None
            worker.heartbeats.messenger.set_address(other.heartbeats.rank, other.store.listener.address)
    for worker in made:
        worker.beat()
    yield made
    for worker in made:
        worker.close()


def all_await(workers: list[Worker], key: str, pauses_s: tuple[float, ...] = (0.0, 0.0, 0.0)) -> None:
    def run(worker: Worker, pause_s: float) -> dict[int, bytes]:
        time.sleep(pause_s)
        return worker.await_all(key, f"of {worker.heartbeats.rank}")

    with ThreadPoolExecutor() as executor:
        found = list(executor.map(run, workers, pauses_s))
    assert found == [{0: b"of 0", 1: b"of 1", 2: b"of 2"}] * 3


def test_members_with_different_stores_meet(workers: list[Worker]) -> None:
    for number, pauses_s in enumerate([(0.0, 0.0, 0.0), (0.5, 0.0, 0.0), (0.0, 0.0, 0.5)]):
        all_await(workers, f"group/{number}", pauses_s)


def test_messages_that_are_lost_are_said_again(workers: list[Worker]) -> None:
    lost, rng, lock = [0], random.Random(1), threading.Lock()

    def losing(send: Callable[[int, bytes], None]) -> Callable[[int, bytes], None]:
        def send_some(rank: int, message: bytes) -> None:
            with lock:
                loses = message[0] in tuple(EntryKind) and rng.random() < 0.5
                lost[0] += loses
            if not loses:
                send(rank, message)

        return send_some

    for worker in workers:
        worker.heartbeats.send = losing(worker.heartbeats.send)  # type: ignore[method-assign]
    for number in range(10):
        all_await(workers, f"group/{number}")
    assert lost[0] > 10


def test_the_next_member_answers_once_the_first_has_left(workers: list[Worker]) -> None:
    all_await(workers, "group/has")
    workers[0].heartbeats._do(lambda liveness: liveness.advance(Stage.LEFT))
    until = time.monotonic() + 60
    while not workers[2].heartbeats.has_left(0) and time.monotonic() < until:
        time.sleep(0.01)
    members, found = (1, 2), []
    for worker in workers[:0:-1]:
        found.append(worker.entries.exchange("group/left", "", members, 0.3))
    while len(found[0]) < 2 and time.monotonic() < until:
        found[0] = workers[2].entries.exchange("group/left", "", members, 0.3)
    assert set(found[0]) == {1, 2}


def test_nobody_waits_for_those_who_will_not_come(workers: list[Worker]) -> None:
    with pytest.raises(RuntimeError, match=r"workers \[0, 2\] will not come"):
        workers[1].await_all("group", "", within_s=0.5)


def test_what_a_member_says_can_be_renewed(workers: list[Worker]) -> None:
    until = time.monotonic() + 60
    for text in ("1", "2"):
        while workers[2].entries.read("waits", bytes.decode).get(1) != text and time.monotonic() < until:
            workers[1].entries.republish("waits", text, MEMBERS)
            workers[2].entries.republish("waits", None, MEMBERS)
            time.sleep(0.05)
    assert workers[2].entries.read("waits", bytes.decode) == {1: "2"}


def test_what_cannot_be_read_is_refused_and_said(workers: list[Worker]) -> None:
    until = time.monotonic() + 60
    while not workers[2].lines and time.monotonic() < until:
        # It may be lost while both ends connect.
        workers[1].entries.broadcast("view/waits", "x", MEMBERS)
        assert workers[2].entries.read("view/waits", lambda entry: None) == {}
        time.sleep(0.05)
    assert workers[2].lines == ["refused what worker 1 says about its waits: it cannot be read"]


def test_a_worker_remembers_so_many_keys(workers: list[Worker]) -> None:
    for number in range(2 * MAX_KEYS):
        workers[0].entries.republish(f"key/{number}", "", ())
    assert len(workers[0].entries._keys) == MAX_KEYS


def test_messages_are_read_as_they_were_written() -> None:
    good = [
        EntryMessage(EntryKind.PUBLISH, "a key", b"entry", True, (0, 3)),
        EntryMessage(EntryKind.PUBLISH, "a key", b"", False, ()),
        EntryMessage(EntryKind.PUBLISH, "a key", None, True, (7,)),
        EntryMessage(EntryKind.ENTRIES, "a key", entries=((3, b"x"), (1, b""))),
        EntryMessage(EntryKind.ENTRIES, "a key"),
    ]
    for message in good:
        data = to_bytes(message)
        assert from_bytes(data) == message
        for end in range(len(data)):
            assert from_bytes(data[:end]) is None
        assert from_bytes(data + b"x") is None
    for bad in (
        EntryMessage(EntryKind.PUBLISH, "", b""),
        EntryMessage(EntryKind.PUBLISH, "a\nkey", b""),
        EntryMessage(EntryKind.PUBLISH, "key", b"", False, (3, 0)),
        EntryMessage(EntryKind.PUBLISH, "key", b"x" * (MAX_ENTRY_BYTES + 1)),
        EntryMessage(EntryKind.ENTRIES, "key", entries=((0, b"x" * (MAX_ENTRY_BYTES + 1)),)),
        EntryMessage(EntryKind.ENTRIES, "key" * 100),
    ):
        assert from_bytes(to_bytes(bad)) is None
    rng = random.Random(0)
    for _ in range(2000):
        data = bytearray(to_bytes(rng.choice(good)))
        data[rng.randrange(len(data))] = rng.randrange(256)
        from_bytes(bytes(data))
