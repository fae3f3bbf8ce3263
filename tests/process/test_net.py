"""Connections, the listener and the messenger, over real sockets in one process."""

from __future__ import annotations

import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from certificates import make_certificates, openssl
from gossamer.errors import InputError
from gossamer.process.net import greeting, listener
from gossamer.process.net.connection import Connection, connect
from gossamer.process.net.greeting import MAGIC, Reason, Refused
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.net.messenger import MAX_MESSAGE_BYTES, Messenger
from gossamer.process.net.tls import VARIABLES, Tls, find_tls_files, make_tls

HOST = "127.0.0.1"
SECRET = b"a secret of some length"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(make_certificates(tmp_path_factory.mktemp("tls")))


@pytest.fixture(params=["plain", "tls"])
def member(request: pytest.FixtureRequest, tls: Tls) -> Identity:
    """A worker, once without TLS and once with it."""
    return Identity(1, secret=SECRET, tls=tls if request.param == "tls" else None)


class Server:
    """A listener that keeps the connections it is given."""

    def __init__(self, identity: Identity) -> None:
        self.lines: list[str] = []
        self.listener = Listener(HOST, identity=identity, on_refused=self.lines.append)
        self.accepted: list[tuple[Connection, bytes]] = []
        self.arrived = threading.Semaphore(0)
        self.listener.register("test", self.accept)

    def accept(self, connection: Connection, hello: bytes) -> None:
        self.accepted.append((connection, hello))
        self.arrived.release()

    def connect(self, identity: Identity, purpose: str = "test", timeout_s: float = 20.0) -> Connection:
        return connect(self.listener.address, purpose, b"hello", identity=identity, timeout_s=timeout_s)

    def pair(self, identity: Identity) -> tuple[Connection, Connection]:
        """Both ends of a new connection."""
        ours = self.connect(identity)
        assert self.arrived.acquire(timeout=60)
        return ours, self.accepted[-1][0]

    def close(self) -> None:
        self.listener.close()
        for connection, _ in self.accepted:
            connection.close()


@pytest.fixture
def server(member: Identity) -> Iterator[Server]:
    server = Server(replace(member, rank=0, incarnation=os.urandom(16)))
    yield server
    server.close()


def soon(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return False


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 20).close()
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        # It did when this connection began, and was closed before it was made.
        pass
    return True


def serves(server: Server) -> bool:
    """Whether a member is still let in."""
    ours, theirs = server.pair(replace(server.listener.identity, rank=1))
    theirs.send(b"ok", deadline=time.monotonic() + 20)
    served = ours.receive(2, time.monotonic() + 20) == b"ok"
    ours.close()
    theirs.close()
    return served


def test_both_ends_know_each_other(server: Server, member: Identity) -> None:
    ours, theirs = server.pair(replace(member, rank=3, incarnation=b"i" * 16))
    assert (ours.peer_rank, theirs.peer_rank) == (0, 3)
    assert theirs.peer_incarnation == b"i" * 16
    assert ours.peer_incarnation == server.listener.identity.incarnation
    assert server.accepted[-1][1] == b"hello"
    launcher, theirs = server.pair(replace(member, rank=None))
    assert theirs.peer_rank is None
    ours.close()
    launcher.close()


def test_large_buffers_travel_both_ways_at_once(server: Server, member: Identity) -> None:
    ours, theirs = server.pair(member)
    data = os.urandom(3_000_000)
    deadline = time.monotonic() + 60
    received = [bytearray(len(data)), bytearray(len(data))]
    threads = [
        threading.Thread(target=lambda: ours.send(data[:5], b"", memoryview(data)[5:], deadline=deadline)),
        threading.Thread(target=lambda: theirs.send(data, deadline=deadline)),
        threading.Thread(target=lambda: ours.receive_into(received[0], deadline)),
        threading.Thread(target=lambda: theirs.receive_into(received[1], deadline)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert received == [data, data]
    ours.close()


def test_close_wakes_both_ends(server: Server, member: Identity) -> None:
    before = num_descriptors()
    ours, theirs = server.pair(member)
    errors: list[Exception] = []

    def receive(connection: Connection) -> None:
        try:
            connection.receive(1, None)
        except ConnectionError as error:
            errors.append(error)

    threads = [threading.Thread(target=receive, args=(end,)) for end in (ours, theirs)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    ours.close()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2
    with pytest.raises(ConnectionError):
        ours.send(b"x", deadline=None)
    theirs.close()
    assert num_descriptors() == before


def test_what_takes_too_long_ends(server: Server, member: Identity) -> None:
    ours, _ = server.pair(member)
    with pytest.raises(TimeoutError):
        ours.receive(1, time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        ours.send(bytes(50_000_000), deadline=time.monotonic() + 0.05)
    ours.close()
    with socket.create_server((HOST, 0)) as mute, pytest.raises(TimeoutError):
        connect(mute.getsockname(), "test", b"", identity=Identity(1), timeout_s=0.1)


@pytest.mark.parametrize("wrong", [{"secret": b""}, {"secret": b"wrong"}, {"run": "2"}])
def test_who_does_not_know_the_secret_stays_outside(server: Server, member: Identity, wrong: dict[str, Any]) -> None:
    for _ in range(3):
        with pytest.raises(Refused, match="GOSSAMER_SECRET"):
            server.connect(replace(member, **wrong))
    assert soon(lambda: server.listener.refusals[Reason.WRONG_PROOF] == 3)
    (line,) = server.lines
    assert "127.0.0.1" in line
    assert "GOSSAMER_SECRET" in line
    assert not server.accepted
    assert serves(server)


def test_a_listener_that_does_not_know_the_secret_is_left() -> None:
    stranger = Server(Identity(0, secret=b"wrong"))
    with pytest.raises(Refused, match="GOSSAMER_SECRET"):
        stranger.connect(Identity(1, secret=SECRET))
    stranger.close()


def test_a_purpose_that_nobody_serves_is_refused(server: Server, member: Identity) -> None:
    with pytest.raises(Refused, match="same version"):
        server.connect(member, "nothing")
    assert soon(lambda: server.listener.refusals[Reason.UNKNOWN_PURPOSE] == 1)
    assert serves(server)


def recorded_greeting(server: Server) -> bytes:
    """All that a member sends to get in."""
    sent: list[bytes] = []
    steps = greeting.ask(Identity(1, secret=SECRET), sent.append, "test", b"hello")
    with socket.create_connection(server.listener.address, 20) as sock:
        wanted = next(steps)
        told = 0
        try:
            while True:
                for data in sent[told:]:
                    sock.sendall(data)
                told = len(sent)
                received = b""
                while len(received) < wanted:
                    received += sock.recv(wanted - len(received))
                wanted = steps.send(received)
        except StopIteration:
            pass
    assert server.arrived.acquire(timeout=60)
    return b"".join(sent)


@pytest.mark.parametrize("member", ["plain"], indirect=True)
def test_recorded_reflected_and_truncated_greetings_are_refused(server: Server) -> None:
    greeting_bytes = recorded_greeting(server)
    num_accepted = len(server.accepted)
    with socket.create_connection(server.listener.address, 20) as sock:
        sock.sendall(greeting_bytes)
        reply = b""
        while data := sock.recv(4096):
            reply += data
    assert soon(lambda: server.listener.refusals[Reason.WRONG_PROOF] == 1)
    assert reply.startswith(MAGIC)
    assert reply.endswith(bytes(32)), "no proof for a stranger"
    # Every prefix of it, and then the end.
    for length in (1, len(MAGIC), 41, 42, 50, len(greeting_bytes) - 1):
        with socket.create_connection(server.listener.address, 20) as sock:
            sock.sendall(greeting_bytes[:length])
    assert soon(lambda: server.listener.refusals[Reason.CUT_OFF] == 6)
    # What the listener sends, sent back to it.
    with socket.create_connection(server.listener.address, 20) as sock:
        sock.sendall(greeting_bytes[:42])
        sock.sendall(sock.recv(42) + bytes(100))
    assert soon(lambda: server.listener.refusals[Reason.NOT_OURS] == 1)
    assert len(server.accepted) == num_accepted
    assert serves(server)


@pytest.mark.parametrize("member", ["plain"], indirect=True)
def test_bytes_that_arrive_after_the_listener_looked_for_some_count(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    greeting_bytes = recorded_greeting(server)
    monkeypatch.setattr(Connection, "has_heard", lambda connection: False)
    for length in (1, 42, len(greeting_bytes) - 1):
        with socket.create_connection(server.listener.address, 20) as sock:
            sock.sendall(greeting_bytes[:length])
    assert soon(lambda: server.listener.refusals[Reason.CUT_OFF] == 3)
    assert serves(server)


@pytest.mark.parametrize("member", ["plain"], indirect=True)
def test_a_changed_claim_is_refused(server: Server) -> None:
    """Rank, purpose and hello are part of the proof."""
    honest, sent = Identity(1, secret=SECRET), []
    sock = socket.create_connection(server.listener.address, 20)
    steps = greeting.ask(honest, sent.append, "test", b"hello")
    next(steps)
    sock.sendall(sent.pop())
    steps.send(sock.recv(42))
    sock.sendall(sent.pop()[:-1] + b"!")
    assert soon(lambda: server.listener.refusals[Reason.WRONG_PROOF] == 1)
    sock.close()
    assert not server.accepted


def test_garbage_is_refused(server: Server) -> None:
    for garbage in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3, os.urandom(100_000), MAGIC + b"\xff" * 5000):
        with socket.create_connection(server.listener.address, 20) as sock:
            try:
                sock.sendall(garbage)
                while sock.recv(4096):
                    pass
            except ConnectionError:
                pass
    reason = Reason.TLS if server.listener.identity.tls else Reason.NOT_OURS
    assert soon(lambda: server.listener.refusals[reason] == 3)
    assert len(server.lines) == 1
    assert serves(server)


def test_who_has_no_certificate_of_the_authority_stays_outside(tls: Tls, tmp_path: Path) -> None:
    server = Server(Identity(0, secret=SECRET, tls=tls))
    other = make_tls(make_certificates(tmp_path))
    mixed = Tls(tls.server, ssl.create_default_context(cafile=None))
    mixed.client.check_hostname, mixed.client.verify_mode = False, ssl.CERT_NONE
    for wrong in (other, Tls(other.server, tls.client), mixed):
        if wrong.client is tls.client:
            # A listener of another authority.
            stranger = Server(Identity(0, secret=SECRET, tls=Tls(other.server, other.client)))
            with pytest.raises(Refused, match="TLS"):
                stranger.connect(Identity(1, secret=SECRET, tls=tls))
            stranger.close()
            continue
        with pytest.raises(Refused, match="TLS"):
            server.connect(Identity(1, secret=SECRET, tls=wrong))
    with pytest.raises(OSError):  # noqa: PT011
        server.connect(Identity(1, secret=SECRET), timeout_s=5.0)
    assert soon(lambda: server.listener.refusals[Reason.TLS] == 3)
    assert not server.accepted
    assert serves(server)
    server.close()


def test_tls_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make_certificates(tmp_path)
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    assert find_tls_files() is None
    monkeypatch.setenv("GOSSAMER_TLS_CERT", files.cert)
    with pytest.raises(InputError, match="give --tls-key or GOSSAMER_TLS_KEY and --tls-ca or GOSSAMER_TLS_CA too"):
        find_tls_files()
    monkeypatch.setenv("GOSSAMER_TLS_KEY", files.key)
    monkeypatch.setenv("GOSSAMER_TLS_CA", files.ca)
    assert find_tls_files() == files
    for wrong in ("/no/such/file", files.ca, str(tmp_path / "locked.pem")):
        openssl("ec", "-in", files.key, "-aes128", "-passout", "pass:secret", "-out", tmp_path / "locked.pem")
        monkeypatch.setenv("GOSSAMER_TLS_KEY", wrong)
        with pytest.raises(InputError, match=r"cannot be used .*expected a certificate, its key without a passphrase"):
            find_tls_files()


def test_ten_thousand_connections_that_are_closed_at_once(server: Server) -> None:
    assert serves(server)
    before = num_descriptors()
    for number in range(10_000):
        sock = socket.create_connection(server.listener.address, 20)
        if number % 2:
            sock.send(b"x")
        sock.close()
    assert serves(server)
    assert soon(lambda: num_descriptors() <= before and not server.listener._openings)
    assert sum(server.listener.refusals.values()) <= 5000
    assert len(server.lines) <= 2


def test_idle_connections_keep_nobody_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GREETING_TIMEOUT_S", 0.5)
    before = num_descriptors()
    idle = [socket.create_connection(server.listener.address, 20) for _ in range(500)]
    assert serves(server)
    assert soon(lambda: not server.listener._openings)
    assert num_descriptors() <= before + 500
    for sock in idle:
        sock.close()
    assert server.listener.refusals[Reason.TOO_MANY] + server.listener.refusals[Reason.TOO_LATE] == 500
    assert len(server.lines) <= 2
    assert num_descriptors() <= before


def test_a_forked_process_holds_no_connection(server: Server, member: Identity) -> None:
    ours, theirs = server.pair(member)
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    ours.close()
    with pytest.raises(ConnectionError):
        theirs.receive(1, time.monotonic() + 60)
    server.listener.close()
    assert soon(lambda: not listens(server.listener.address))
    os.kill(child, 9)
    os.waitpid(child, 0)


class Mailbox:
    """A messenger and what it received."""

    def __init__(self, rank: int, member: Identity) -> None:
        self.identity = replace(member, rank=rank, incarnation=os.urandom(16))
        self.listener = Listener(HOST, identity=self.identity)
        self.received: list[tuple[int, bytes]] = []
        self.messenger = Messenger(self.listener, self.identity, lambda rank, data: self.received.append((rank, data)))

    def knows(self, other: Mailbox) -> None:
        self.messenger.set_address(other.identity.rank or 0, other.listener.address)

    def close(self) -> None:
        self.messenger.close()
        self.listener.close()


@pytest.fixture
def mailboxes(member: Identity) -> Iterator[list[Mailbox]]:
    mailboxes = [Mailbox(rank, member) for rank in range(2)]
    mailboxes[0].knows(mailboxes[1])
    mailboxes[1].knows(mailboxes[0])
    yield mailboxes
    for mailbox in mailboxes:
        mailbox.close()


def test_messages_arrive_in_order(mailboxes: list[Mailbox]) -> None:
    zero, one = mailboxes
    # The first one waits until there is a connection.
    assert zero.messenger.send(1, b"0")
    assert soon(lambda: zero.messenger.connected(1) and one.messenger.connected(0))
    assert one.messenger.send(0, b"0")
    for number in range(1, 500):
        assert soon(lambda number=number: zero.messenger.send(1, b"%d" % number))  # type: ignore[misc]
        # Over the same connection: nobody needs to know the address of who connected.
        assert soon(lambda number=number: one.messenger.send(0, b"%d" % number))  # type: ignore[misc]
    assert soon(lambda: len(zero.received) == len(one.received) == 500)
    assert one.received == [(0, b"%d" % number) for number in range(500)]
    assert zero.received == [(1, b"%d" % number) for number in range(500)]
    zero.messenger.send(1, bytes(MAX_MESSAGE_BYTES))
    assert soon(lambda: one.received[-1] == (0, bytes(MAX_MESSAGE_BYTES)))
    with pytest.raises(ValueError, match="at most"):
        zero.messenger.send(1, bytes(MAX_MESSAGE_BYTES + 1))


def test_a_messenger_connects_again(mailboxes: list[Mailbox]) -> None:
    zero, one = mailboxes
    assert zero.messenger.send(1, b"first")
    assert soon(lambda: one.received == [(0, b"first")])
    one.close()
    assert soon(lambda: not zero.messenger.connected(1))
    zero.messenger.send(1, b"nobody there")
    mailboxes[1] = one = Mailbox(1, zero.identity)
    zero.knows(one)
    # What is sent while the old address is tried is lost with it.
    assert soon(lambda: zero.messenger.send(1, b"second") and one.received[-1:] == [(0, b"second")])
    assert (0, b"first") not in one.received
    assert not zero.messenger.send(7, b"unknown worker")


@pytest.mark.parametrize("host", ["name.invalid", "n" * 255])
def test_a_worker_whose_address_is_a_name_is_dialled_once_it_has_another(mailboxes: list[Mailbox], host: str) -> None:
    zero, one = mailboxes
    zero.messenger.set_address(1, (host, 1))
    assert zero.messenger.send(1, b"nowhere")
    assert soon(lambda: zero.messenger.num_dropped == 1)
    zero.knows(one)
    assert soon(lambda: zero.messenger.send(1, b"here") and bool(one.received))
    assert set(one.received) == {(0, b"here")}


def test_a_worker_that_could_not_be_dialled_since_no_descriptor_was_left_is_dialled_again(
    mailboxes: list[Mailbox],
) -> None:
    zero, one = mailboxes
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        assert zero.messenger.send(1, b"too early")
        assert soon(lambda: zero.messenger.num_dropped == 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert soon(lambda: zero.messenger.send(1, b"again") and bool(one.received))
    assert set(one.received) == {(0, b"again")}


def test_a_peer_that_does_not_read_blocks_nobody(mailboxes: list[Mailbox]) -> None:
    zero, _ = mailboxes
    silent = Server(replace(zero.identity, rank=2))
    silent.listener.register("message", silent.accept)
    zero.messenger.set_address(2, silent.listener.address)
    assert soon(lambda: zero.messenger.send(2, b"x"))
    assert soon(lambda: zero.messenger.send(1, b"x") and bool(mailboxes[1].received))
    message = bytes(MAX_MESSAGE_BYTES)
    assert soon(lambda: not zero.messenger.send(2, message))
    assert soon(lambda: zero.messenger.send(1, b"still there"))
    assert soon(lambda: mailboxes[1].received[-1] == (0, b"still there"))
    silent.close()


def test_a_peer_that_sends_garbage_is_dropped(mailboxes: list[Mailbox]) -> None:
    zero, _ = mailboxes
    member = replace(zero.identity, rank=5)
    bad = connect(zero.listener.address, "message", b"", identity=member, timeout_s=20)
    bad.send(b"\xff" * 100, deadline=None)
    with pytest.raises(ConnectionError):
        bad.receive(1, time.monotonic() + 20)
    assert not zero.received
    bad.close()
    stranger = replace(member, secret=b"")
    with pytest.raises(Refused):
        connect(zero.listener.address, "message", b"", identity=stranger, timeout_s=20)


def test_a_messenger_tells_where_nobody_listens_and_keeps_to_its_subject(mailboxes: list[Mailbox]) -> None:
    zero, one = mailboxes
    refused: list[tuple[int, tuple[str, int]]] = []
    listener = Listener(HOST, identity=replace(zero.identity, rank=3))
    other = Messenger(
        listener, listener.identity, lambda rank, data: None, lambda *where: refused.append(where), b"another subject"
    )
    other.set_address(0, zero.listener.address)
    other.set_address(1, one.listener.address)
    one.close()
    # The connection is closed as soon as its subject is known, so nothing ever arrives.
    assert soon(lambda: other.send(0, b"not for you"))
    assert soon(lambda: not other.connected(0))
    assert soon(lambda: (other.send(1, b"nobody"), (1, one.listener.address) in refused)[1])
    assert not zero.received
    other.close()
    listener.close()
