"""Connections and the listener, over real sockets in one process."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from net_server import HOST, SECRET, Server, soon

from certificates import make_certificates, openssl
from gossamer.errors import InputError
from gossamer.process.net import greeting, listener
from gossamer.process.net.connection import Connection, connect
from gossamer.process.net.greeting import MAGIC, Reason, Refused
from gossamer.process.net.identity import Identity
from gossamer.process.net.tls import VARIABLES, Tls, find_tls_files, make_tls


@pytest.fixture
def server(member: Identity) -> Iterator[Server]:
    server = Server(replace(member, rank=0, incarnation=os.urandom(16)))
    yield server
    server.close()


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
