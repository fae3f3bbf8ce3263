"""Faults of networks and stores: deaths in a row, values in the store that nobody wrote, where the store listens."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import faults
import join_faults
import join_script
import pytest
import stranger_faults
from real_workers import RealWorkers

from gossamer.process.collectives.call import read_publication
from gossamer.process.events import Events
from gossamer.process.joining.handshake import Handshake
from gossamer.process.joining.join_facts import from_text
from gossamer.process.net.identity import Identity
from gossamer.process.roster.roster import Roster, read_roster
from gossamer.process.roster.roster_store import take_rank
from gossamer.process.store.addresses import listening_addresses, local_address
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host, HostedStore
from gossamer.process.store.parsing import (
    MAX_TEXT_CHARS,
    Refusals,
    read_address,
    read_json,
    read_number,
    read_ranks,
    read_text,
    read_time,
)
from gossamer.process.store.rank_info import free_port
from gossamer.runs.status import StatusBoard


def test_a_worker_dies_after_it_said_that_it_is_there() -> None:
    faults.test_a_worker_dies_after_it_said_that_it_is_there("overlap", run=1)


NO_VALUES = (b"x", b"\xff\x00", b"9" * 5000, b"[" * 100_000)
"""Neither text, nor a number that can be read, nor JSON."""

READ_BY_ALL = ("address/2", "done/2")
"""What workers read while they train, and the roster, which the first to read it mends. The others are read by those
that come, or come back."""

KEYS = (
    *READ_BY_ALL,
    "roster",
    "roster/given",
    "claim/1",
    "failure/1",
    "series/1",
    "series-at/1",
    "began",
    "started",
    "announcement",
)
KEYS += ("handshake/first", "handshake/differs", "handshake/rank/1", "handshake/read/1", "monitor", "batches", "epoch")


@pytest.mark.parametrize("bad", NO_VALUES, ids=["text", "bytes", "digits", "nested"])
@pytest.mark.parametrize("method", ["allreduce", "a2cid2"])
def test_values_in_the_store_that_no_worker_wrote(method: str, bad: bytes, tmp_path: Path) -> None:
    with RealWorkers(3, method=method, steps=100_000, until=tmp_path / "enough", averaged=True) as workers:
        for worker in workers:
            worker.step(20)
        host, port = workers.environment["MASTER_ADDR"], int(workers.environment["MASTER_PORT"])
        home, identity = Home(host, port, Host.LAUNCHER, ""), Identity(None, "run/0")
        store = FailoverStore(home, identity, "gossamer/run/0/0/", 10.0)
        store.set_all(dict.fromkeys(KEYS, bad))
        for key in READ_BY_ALL:
            workers[0].said(f"refused what the store has at {key}")
        until = time.monotonic() + 60
        while read_roster(store.get("roster")) is None and time.monotonic() < until:
            time.sleep(0.05)
        # Those that come read the rest.
        workers.kill(1)
        workers[0].said("worker 1 died")
        assert any("came back" in event for event in workers.restart(1).at("joined")["events"])
        (newcomer,) = workers.grow(1)
        assert newcomer.at("joined")["rank"] == 3
        assert read_roster(store.get("roster")) == Roster(3, frozenset({3}))
        assert read_number(store.get("roster/given")) == 1
        store.close()
        workers[0].said("worker 3 has come to the run")
        (tmp_path / "enough").touch()
        faults.good(workers.finished())


def test_a_count_in_the_store_that_nobody_counts_up_to() -> None:
    lines: list[str] = []
    refusals, port = Refusals(lines.append), free_port()
    store = FailoverStore(Home("127.0.0.1", port, Host.RANK_0, ""), Identity(0), "test/", 20.0)
    for bad in (b"x", b"-5", b"9" * 18, b"9" * 5000, b""):
        store.set("count", bad)
        assert refusals.add(store, "count", 2, 7) == 9
        assert refusals.add(store, "count", 2, 7) == 11
    assert (refusals.count, len(lines)) == (5, 1)
    # Ranks are given after those that there are.
    for bad in (b"x", b"-5", b"9" * 18, b"70000"):
        store.set("roster/given", bad)
        assert take_rank(store, Roster(3, frozenset({3, 4}))) == 5
    for bad in (b"x", b"\xff", b"1" * 5000):
        store.set("began", bad)
        assert refusals.agreed(store, "began", "1.5", read_time) == 1.5
        assert refusals.agreed(store, "began", "2.5", read_time) == 1.5
    store.close()


def test_what_differs_need_not_be_a_rank() -> None:
    for bad in NO_VALUES:
        handshakes = [
            Handshake(rank, 1, {"a fact": "the same"}, store, SimpleNamespace(), 20.0, Events(rank))  # type: ignore[arg-type]
            for rank, store in [
                (0, FailoverStore(Home("127.0.0.1", free_port(), Host.RANK_0, ""), Identity(0), "", 20.0))
            ]
        ]
        handshakes[0].store.set("handshake/differs", bad)
        handshakes[0].run()
        handshakes[0].store.close()


def test_what_cannot_be_read_counts_as_not_published() -> None:
    for bad in (None, b"", b"abc", b"-1", b"1.5", b"1" * 16, b" 1", "١".encode()):
        assert read_number(bad) is None
    assert read_number(b"017") == 17
    for bad in (None, b"", b"nan", b"inf", b"1e9", b"-1.0"):
        assert read_time(bad) is None
    assert read_time(b"1700000000.25") == 1700000000.25
    for bad in (None, b"x", b"host", b"host 0", b"host 65536", b"a b 3", b"host\n3", b"\xff 3"):
        assert read_address(bad) is None
    assert read_address(b"fe80::1 80") == ("fe80::1", 80)
    for bad in (None, b"", b"\xff[", b"{}", b"[]", b"[1, 0]", b"[0, 0]", b"[0, 3]", b"[true]", b'["0"]', b"[0.0]"):
        assert read_ranks(bad, range(3)) is None
    assert read_ranks(b"[0, 2]", range(3)) == [0, 2]
    for bad in (None, b"", b"\xff", b"a\nb", b"\x1b[0m", b"x" * (MAX_TEXT_CHARS + 1)):
        assert read_text(bad) is None
    assert read_text("wörker 1".encode()) == "wörker 1"
    for bad in NO_VALUES:
        assert read_json(bad) is None
        assert read_roster(bad) is None
        assert from_text(bad) is None
        assert StatusBoard(SimpleNamespace(get=lambda key: bad)).get(0) is None  # type: ignore[arg-type]  # noqa: B023
        assert read_publication(bad) is None
    wait = {"key": "k", "text": "a call", "members": [0, 1], "completed": []}
    good = {"number": 1, "waiting": {"foreground": wait}}
    assert read_publication(json.dumps(good).encode()) is not None
    for part in ({"key": 1}, {"text": "a\nb"}, {"text": ""}, {"members": "01"}, {"completed": [1]}, {"more": 1}):
        other = {"number": 1, "waiting": {"foreground": wait | part}}
        assert read_publication(json.dumps(other).encode()) is None
    for part in ({"number": -1}, {"number": 1 << 62}, {"number": 1.5}, {"number": True}, {"waiting": []}):
        assert read_publication(json.dumps(good | part).encode()) is None


def test_each_value_that_cannot_be_read_is_said_once() -> None:
    lines: list[str] = []
    refusals = Refusals(lines.append)
    for _ in range(3):
        assert refusals.checked("address/1", b"x", None) is None
    assert refusals.checked("address/2", None, None) is None
    assert refusals.checked("address/2", b"1", 1) == 1
    assert (refusals.count, len(lines)) == (3, 1)
    assert "address/1" in lines[0]


def test_a_store_listens_where_it_is_asked_to() -> None:
    assert listening_addresses("127.0.0.1") == listening_addresses("localhost") == ["127.0.0.1"]
    assert listening_addresses("::1") == ["::1"]
    assert listening_addresses("192.0.2.1") == ["192.0.2.1", "0.0.0.0"]
    assert listening_addresses("a-name") == ["0.0.0.0"]
    store = HostedStore("127.0.0.1", 0, Identity(0), print)
    port = store.address[1]
    # Another address of this machine.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)
    socket.create_connection(("127.0.0.1", port), 5).close()
    store.listener.close()


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="looks into /proc")
def test_workers_listen_where_they_are_asked_to_and_nowhere_else(tmp_path: Path) -> None:
    with RealWorkers(2, method="gossip", steps=100_000, until=tmp_path / "enough") as workers:
        for worker in workers:
            worker.step(20)
        pids = [worker.process.pid for worker in workers]
        addresses = [stranger_faults.listening_at(pid) for pid in pids if pid is not None]
        (tmp_path / "enough").touch()
        workers.finished()
    assert [len(found) for found in addresses] == [2, 1], "the home store, and a port for each worker"
    assert {host for found in addresses for host, _ in found} == {"127.0.0.1"}


def test_workers_that_are_given_a_name_that_does_not_resolve_end_with_one_line() -> None:
    order = {"method": "gossip", "ranks": {0: {"timeout": 0.5}, 1: {"timeout": 0.5}}}
    environment = {"MASTER_ADDR": join_faults.NOWHERE}
    with RealWorkers(2, script=join_script.run, environment=environment, **order) as workers:
        whys = [worker.at("refused")["why"] for worker in workers]
    for why in whys:
        assert why.startswith(f"MASTER_ADDR '{join_faults.NOWHERE}' does not resolve (")
        assert why.endswith("): set it to the name or address of the machine of worker 0")


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_workers_meet_over_ipv6() -> None:
    assert local_address("::1") == "::1"
    with RealWorkers(2, method="gossip", steps=40, environment={"MASTER_ADDR": "::1"}) as workers:
        faults.good(workers.finished())
