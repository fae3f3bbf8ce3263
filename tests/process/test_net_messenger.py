"""Short messages between workers, over real sockets in one process."""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from net_server import HOST, Server, soon

from gossamer.process.net.connection import connect
from gossamer.process.net.greeting import Refused
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.net.messenger import MAX_MESSAGE_BYTES, Messenger


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
    assert zero.messenger.send(1, b"here")
    assert soon(lambda: one.received == [(0, b"here")])


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
    sent = itertools.count(1)
    assert soon(lambda: next(sent) and zero.messenger.send(1, b"again") and bool(one.received))
    # What is sent before the address is tried again is dropped, and counted.
    expected = next(sent) - zero.messenger.num_dropped
    assert soon(lambda: one.received == [(0, b"again")] * expected)


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
