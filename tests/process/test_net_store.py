"""The key-value store on the listening port: requests, waits, bad clients; and the failover store's home."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gossamer.errors import InputError
from gossamer.process.net import first_answer, secret
from gossamer.process.net.connection import connect
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.net.loop import Loop
from gossamer.process.store import store_messages
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host, HostedStore
from gossamer.process.store.rank_info import free_port
from gossamer.process.store.store_client import StoreClient
from gossamer.process.store.store_messages import Operation
from gossamer.process.store.store_server import StoreServer

HOST = "127.0.0.1"
MEMBER = Identity(0, secret=b"a secret of some length")


class Server:
    def __init__(self) -> None:
        self.listener = Listener(HOST, identity=MEMBER)
        self.store = StoreServer(self.listener)
        self.loop = Loop("client")
        self._clients: list[StoreClient] = []

    def client(self) -> StoreClient:
        self._clients.append(StoreClient.connect(self.listener.address, MEMBER, self.loop, 20.0))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.listener.close()
        self.loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_requests(server: Server) -> None:
    one, other = server.client(), server.client()
    one.set({"a": b"1", "b": b""})
    assert other.get(["a", "b", "c"]) == [b"1", b"", None]
    assert other.has(["a", "b"])
    assert not other.has(["a", "c"])
    assert one.compare_set("c", b"", b"first") == b"first"
    assert other.compare_set("c", b"", b"second") == b"first"
    assert other.compare_set("c", b"first", b"second") == b"second"
    # A key without a value is not expected to have one.
    assert other.compare_set("d", b"x", b"y") is None
    assert [one.add("n", 2), other.add("n", -5)] == [2, -3]
    assert one.add("c", 1) is None
    large = bytes(5_000_000)
    one.set({"large": large})
    assert other.get(["large"]) == [large]
    assert server.store.num_requests == 13


def test_a_wait_ends_with_the_key_or_in_time_and_blocks_nobody(server: Server) -> None:
    client = server.client()
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(client.get(["late", "later"], wait_s=50.0)))
    waiting.start()
    assert client.get(["late"]) == [None]
    client.set({"late": b"1"})
    assert not client.has(["later"], wait_s=0.05)
    server.client().set({"later": b"2"})
    waiting.join(60)
    assert found == [[b"1", b"2"]]
    assert not server.store._waits


def test_a_store_that_dies_ends_all_waits(server: Server) -> None:
    client = server.client()
    errors: list[OSError] = []

    def wait() -> None:
        try:
            client.get(["never"], wait_s=50.0)
        except OSError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    server.listener.close()
    waiting.join(60)
    assert len(errors) == 1
    with pytest.raises(OSError, match="closed"):
        client.get(["a"])


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 100,
        b"\x03\0\0\0abc",
        store_messages.encode(1, Operation.ANSWER, []),
        store_messages.encode(1, Operation.SET, [b"key without value"]),
        store_messages.encode(1, Operation.ADD, [b"key"]),
        store_messages.encode(1, Operation.GET, [b"key"], wait_s=float("nan")),
        store_messages.encode(1, Operation.GET, [b"key"], wait_s=1e9),
        store_messages.encode(1, Operation.GET, [None]),
        struct.pack("<IIBdII", 25, 1, Operation.GET, 0.0, 1, 1000) + b"short",
    ],
)
def test_what_is_no_request_ends_that_connection_only(server: Server, garbage: bytes) -> None:
    good = server.client()
    bad = connect(server.listener.address, "store", b"", identity=MEMBER, timeout_s=20)
    bad.send(garbage, deadline=None)
    with pytest.raises(ConnectionError):
        bad.receive(1, time.monotonic() + 60)
    bad.close()
    good.set({"a": b"1"})
    assert good.get(["a", "key"]) == [b"1", None]


def test_messages_are_read_as_they_were_written() -> None:
    data = bytearray(store_messages.encode(7, Operation.GET, [b"a", b""], 1.5) + store_messages.encode(8, 0, [None]))  # type: ignore[arg-type]
    whole = bytes(data)
    first, second = store_messages.take(data), store_messages.take(data)
    assert first == (7, Operation.GET, 1.5, [b"a", b""])
    assert second == (8, Operation.ANSWER, 0.0, [None])
    assert not data
    for length in range(len(whole)):
        part = bytearray(whole[:length])
        assert store_messages.take(part) in (None, first)


def failover_store(port: int, rank: int | None, host: Host = Host.RANK_0, **more: object) -> FailoverStore:
    timeout_s = float(more.pop("timeout_s", 20.0))  # type: ignore[arg-type]
    identity = Identity(rank, **{"secret": MEMBER.secret, **more})  # type: ignore[arg-type]
    return FailoverStore(Home(HOST, port, host, ""), identity, "test/", timeout_s)


def test_several_users_of_one_process_share_the_home_store() -> None:
    port = free_port()
    first, second = failover_store(port, 0), failover_store(port, 0)
    first.set("a", "1")
    assert second.get_all(["a", "b"]) == [b"1", None]
    first.close()
    assert second.get("a") == b"1"
    assert second.hosted_here
    second.close()
    # The port is free again.
    again = failover_store(port, 0)
    assert again.get("a") is None
    again.close()


def test_workers_move_to_a_spare_and_back() -> None:
    home = HostedStore(HOST, 0, MEMBER, print)
    port = home.address[1]
    worker = failover_store(port, 1, Host.LAUNCHER)
    worker.spares[1] = worker.listen(HOST).address
    moves: list[bytes | None] = []
    worker.on_move.append(lambda: moves.append(worker.get("a")))
    assert worker.set("a", "home")
    home.listener.close()
    worker.get("a")
    until = time.monotonic() + 60
    while not worker.set("a", "spare") and time.monotonic() < until:
        time.sleep(0.05)
    assert worker.hosted_here
    again = HostedStore(HOST, port, MEMBER, print)
    while worker.hosted_here and time.monotonic() < until:
        worker.move_to_earlier()
        time.sleep(0.05)
    assert worker.get("a") is None
    assert len(moves) == 2
    worker.close()
    again.listener.close()


def test_stores_that_do_not_answer_cost_no_time_each() -> None:
    """A side of a partition without the home store and the first of the spare ones: nothing refuses a connection."""
    home, spare = HostedStore(HOST, 0, MEMBER, print), HostedStore(HOST, 0, MEMBER, print)
    worker = failover_store(home.address[1], 1, Host.LAUNCHER)
    silent = [socket.create_server((HOST, 0)) for _ in range(32)]
    worker.spares |= {rank: server.getsockname() for rank, server in enumerate(silent)}
    worker.spares[32] = spare.address
    began = time.monotonic()
    home.listener.close()
    while not worker.set("a", "1") and time.monotonic() < began + 60:
        time.sleep(0.05)
    # One after the other would take 64 s.
    assert time.monotonic() - began < 20
    assert worker._current == spare.address
    worker.close()
    spare.listener.close()
    for server in silent:
        server.close()


def test_a_worker_prefers_the_first_store_and_tries_those_out_of_reach_last(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a store may take long to answer.
    monkeypatch.setattr(first_answer, "STEP_S", 5.0)
    monkeypatch.setattr(first_answer, "PREFER_S", 5.0)
    home = HostedStore(HOST, 0, MEMBER, print)
    stores = [HostedStore(HOST, 0, MEMBER, print) for _ in range(4)]
    worker = failover_store(home.address[1], 1, Host.LAUNCHER)
    worker.spares |= {rank: store.address for rank, store in enumerate(stores)}
    worker.unreachable = lambda: {0, 1}
    assert worker._addresses() == (
        [home.address, stores[2].address, stores[3].address],
        [stores[0].address, stores[1].address],
    )
    home.listener.close()
    until = time.monotonic() + 60
    while not worker.set("a", "1") and time.monotonic() < until:
        time.sleep(0.05)
    assert worker._current == stores[2].address
    for store in stores[2:]:
        store.listener.close()
    while (not worker.set("a", "1") or worker._current == stores[2].address) and time.monotonic() < until:
        time.sleep(0.05)
    # It may be reached after all.
    assert worker._current == stores[0].address
    worker.close()
    for store in stores[:2]:
        store.listener.close()


def test_one_search_serves_all_threads_and_holds_up_no_other_call() -> None:
    home, spare = HostedStore(HOST, 0, MEMBER, print), HostedStore(HOST, 0, MEMBER, print)
    worker = failover_store(home.address[1], 1, Host.LAUNCHER)
    silent = socket.create_server((HOST, 0))
    worker.spares |= {0: silent.getsockname(), 1: spare.address}
    moves: list[int] = []
    worker.on_move.append(lambda: moves.append(1))
    home.listener.close()
    worker.get("a")
    with ThreadPoolExecutor() as executor:
        futures = [executor.submit(worker.set, "a", "1") for _ in range(8)]
        # Also while the search lasts.
        worker.move_to_earlier()
        assert all(future.result(60) for future in futures)
    assert (len(moves), worker._current) == (1, spare.address)
    worker.close()
    spare.listener.close()
    silent.close()


def test_a_search_ends_when_the_worker_closes() -> None:
    home = HostedStore(HOST, 0, MEMBER, print)
    worker = failover_store(home.address[1], 1, Host.LAUNCHER)
    silent = socket.create_server((HOST, 0))
    worker.spares[0] = silent.getsockname()
    home.listener.close()
    worker.get("a")
    with ThreadPoolExecutor() as executor:
        search = executor.submit(worker.get, "a")
        worker.close()
        assert search.result(60) is None
    silent.close()


def test_a_worker_without_the_secret_is_told_so() -> None:
    home = HostedStore(HOST, 0, MEMBER, print)
    for wrong in ({"secret": b""}, {"secret": b"another secret of some length"}, {"run": "another"}):
        with pytest.raises(InputError, match=r"this worker does not know the secret of this run.*GOSSAMER_SECRET"):
            failover_store(home.address[1], 1, Host.LAUNCHER, **wrong)
    home.listener.close()


def test_the_secret_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    path = f"{tmp_path}/secret"
    monkeypatch.delenv(secret.VALUE, raising=False)
    assert secret.find_secret() == b""
    monkeypatch.setenv(secret.VALUE, " 0123456789abcdef\n")
    assert secret.find_secret() == b"0123456789abcdef"
    monkeypatch.setenv(secret.FILE, path)
    with pytest.raises(InputError, match="both set"):
        secret.find_secret()
    monkeypatch.delenv(secret.VALUE)
    with pytest.raises(InputError, match="cannot be read"):
        secret.find_secret()
    with open(path, "w") as file:
        file.write("short\n")
    with pytest.raises(InputError, match="has 5 bytes: expected 16 to 4096"):
        secret.find_secret()
    with open(path, "w") as file:
        file.write("0123456789abcdef\n")
    assert secret.find_secret() == b"0123456789abcdef"
    assert len(secret.make_secret()) == 64
    assert b"secret" not in repr(MEMBER).encode().replace(b"secret=", b"")


def test_addresses_of_this_machine_alone() -> None:
    assert secret.is_loopback("127.0.0.1")
    assert secret.is_loopback("::1")
    assert secret.is_loopback("localhost")
    assert not secret.is_loopback("192.0.2.1")
    assert not secret.is_loopback("no-such-host.invalid")
