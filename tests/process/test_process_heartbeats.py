"""Heartbeats of a real worker: they wait for no store, and numbers that nobody counts up to are refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gossamer.process.liveness.heartbeats import Heartbeats, HeartbeatThreads, read_stage
from gossamer.process.liveness.liveness import Liveness
from gossamer.process.liveness.records import Kind, Record, Stage, first_record, from_bytes, to_bytes
from gossamer.process.net.identity import Identity
from gossamer.process.roster.roster import KnownRoster, Roster
from gossamer.process.state.lineage import ViewId
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host, HostedStore
from gossamer.process.store.parsing import MAX_JUMP, MAX_PROCESS, Refusals
from gossamer.process.store.worker_addresses import WorkerAddresses
from gossamer.process.views import messages
from gossamer.process.views.agreement import Agreement
from gossamer.process.views.messages import Member, ViewKind, ViewMessage

HOST = "127.0.0.1"


class Worker:
    def __init__(self) -> None:
        self.home = HostedStore(HOST, 0, Identity(), print)
        self.store = FailoverStore(Home(HOST, self.home.address[1], Host.LAUNCHER, ""), Identity(0), "test/", 20.0)
        self.lines: list[str] = []
        self.refusals = Refusals(self.lines.append)
        addresses = WorkerAddresses(0, self.store.listen(HOST).address, self.store, self.refusals)
        self.heartbeats = Heartbeats(0, KnownRoster(Roster(3)), self.store, addresses)
        self.agreement = Agreement(self.heartbeats, self.refusals)

    def receive(self, data: bytes) -> None:
        """Worker 1 sends this."""
        done = threading.Event()

        def handle() -> None:
            self.heartbeats._on_message(1, data)
            done.set()

        self.store.loop.call_soon(handle)
        assert done.wait(60)

    @property
    def own(self) -> Record:
        return self.heartbeats._liveness.own


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.store.close()
    made.home.listener.close()


def until(is_so: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_heartbeats_are_counted_while_the_store_does_not_answer(worker: Worker) -> None:
    answers, asked = threading.Event(), threading.Event()

    def wait(*keys: object) -> list[None]:
        asked.set()
        answers.wait()
        return [None] * 4

    worker.store.get_all = wait  # type: ignore[method-assign, assignment]
    polls: list[int] = []
    thread = HeartbeatThreads(worker.heartbeats, lambda: polls.append(1))
    assert asked.wait(60)
    count, num_polls = worker.own.heartbeats, len(polls)
    until(lambda: worker.own.heartbeats > count + 5 and len(polls) > num_polls + 5)
    answers.set()
    thread.close(60)
    assert not any(each.is_alive() for each in thread._threads)


def test_to_ask_who_is_dead_asks_no_store(worker: Worker) -> None:
    """The training thread does, while it waits for others."""
    died: list[int] = []
    worker.heartbeats.on_death = lambda rank: died.append(rank)
    for rank in (1, 2):
        worker.heartbeats._do(lambda liveness: setattr(liveness, "all_seen", True))
        record = first_record(rank, 1, (HOST, 9))
        worker.heartbeats._do(
            lambda liveness, record=record: liveness._learn(record, record.rank, time.monotonic() - 100)
        )
    worker.heartbeats.beat()
    until(lambda: worker.heartbeats.dead(1) and worker.heartbeats.dead(2))
    assert not died
    worker.heartbeats.follow()
    assert sorted(died) == [1, 2]
    # Whose spares are tried last.
    assert worker.store.unreachable() == {1, 2}


def a_record(**fields: object) -> Record:
    return first_record(1, 7, (HOST, 9))._replace(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [1 << 62, (1 << 64) - 1, MAX_JUMP + 1])
def test_requests_for_views_that_nobody_counts_up_to_are_refused(worker: Worker, number: int) -> None:
    worker.receive(to_bytes(Kind.GOSSIP, [a_record(requests=(0, number, 0))]))
    worker.receive(
        to_bytes(
            Kind.GOSSIP, [first_record(1, 7, (HOST, 9)), first_record(2, 7, (HOST, 9))._replace(requests=(number,) * 3)]
        )
    )
    assert worker.own.requests == (0, 0, 0)
    assert worker.refusals.count == 2
    assert worker.lines == ["refused the number of a view in a message of worker 1: it cannot be read"]
    # What follows is heard.
    worker.receive(to_bytes(Kind.GOSSIP, [a_record(requests=(0, 3, 0))]))
    assert worker.own.requests == (0, 3, 0)


@pytest.mark.parametrize("number", [1 << 62, (1 << 64) - 1, MAX_JUMP + 1])
@pytest.mark.parametrize("kind", ViewKind)
def test_messages_about_views_that_nobody_counts_up_to_are_refused(worker: Worker, kind: ViewKind, number: int) -> None:
    members = (Member(0, worker.own.process), Member(1, 7))
    for message in (
        ViewMessage(kind, 0, 7, number),
        ViewMessage(kind, 0, 7, 1, ViewId(number, 1, 7), members),
    ):
        worker.receive(messages.to_bytes(message))
    machine = worker.agreement._machines[0]
    assert (machine.requested, machine.installed) == (0, None)
    assert (worker.refusals.count, len(worker.lines)) == (2, 1)


@pytest.mark.parametrize("process", [MAX_PROCESS + 1, (1 << 64) - 1])
def test_numbers_of_processes_that_there_cannot_be_are_refused(worker: Worker, process: int) -> None:
    assert from_bytes(to_bytes(Kind.GOSSIP, [a_record(process=process)]), 3) is None
    view = ViewMessage(ViewKind.PROPOSE, 0, 7, 1, ViewId(1, 1, 7), (Member(1, 7),))
    assert messages.from_bytes(messages.to_bytes(view), 3) == view
    for bad in (
        view._replace(process=process),
        view._replace(id=ViewId(1, 1, process)),
        view._replace(members=(Member(1, process),)),
    ):
        assert messages.from_bytes(messages.to_bytes(bad), 3) is None
    assert read_stage(b"1 %d" % process) is None
    assert read_stage(b"1 7") == (Stage.DONE, 7)
    worker.receive(to_bytes(Kind.GOSSIP, [a_record(process=process)]))
    assert worker.lines == ["refused a message of worker 1: it cannot be read"]


def test_a_worker_goes_on_after_the_largest_numbers_that_are_accepted() -> None:
    liveness = Liveness(first_record(0, 5, (HOST, 8)), 2, 0.0)
    liveness._learn(first_record(0, MAX_PROCESS, (HOST, 8)), 1, 1.0)
    assert liveness.own.process == MAX_PROCESS
    assert from_bytes(to_bytes(Kind.GOSSIP, [liveness.own]), 2) is not None
