"""Small messages between any two workers, at most once each, over connections that are opened on demand."""

from __future__ import annotations

import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable

from gossamer.process.net.connection import Address, Connection
from gossamer.process.net.dialing import Dialing
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.net.loop import READ, WRITE

PURPOSE = "message"
MAX_MESSAGE_BYTES = 64 * 1024
MAX_QUEUED_BYTES = 256 * 1024
"""Of messages that a peer has not taken yet; more are dropped."""

MAX_EARLY_BYTES = 128 * 1024
"""Of messages that wait for a connection; more are dropped, and all if there is none."""

CONNECT_TIMEOUT_S = 3.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
IDLE_S = 1.0
"""A connection without a message for this long is closed: those that send to each other all the time keep theirs."""

SPARE_IDLE_S = 0.5
"""The same of one beside another with the same peer, which neither uses."""

ACKNOWLEDGED_MS = 3000
"""A connection whose peer has not acknowledged something for this long is closed: once the network is whole again, a
new one is there at once, while the old one might take a minute."""

READ_BYTES = 64 * 1024
READS_PER_TURN = 4
"""One peer that sends without end must not keep the others from their turn."""

logger = logging.getLogger("gossamer")

_LENGTH = struct.Struct("<I")


class _Link:
    """One connection, its incoming bytes and its outgoing ones."""

    def __init__(self, rank: int, connection: Connection, preferred: bool) -> None:
        """``preferred``: the end with the lower rank has made it. Of two with one process both ends use that one."""
        self.rank, self.connection, self.preferred = rank, connection, preferred
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.used = time.monotonic()


class Messenger:
    """Sends and receives messages in the thread of a listener's loop, one for all peers."""

    def __init__(
        self,
        listener: Listener,
        identity: Identity,
        on_message: Callable[[int, bytes], None],
        on_refused: Callable[[int, Address], None] = lambda rank, address: None,
        about: bytes = b"",
    ) -> None:
        """Callbacks come in the thread of the loop, and must not block.

        ``on_message(rank, message)``: a message came. ``on_refused(rank, address)``: nothing listens where that worker
        did. ``about``: both ends must have the same; connections about something else are closed.
        """
        self._listener, self._identity, self._about = listener, identity, about
        self._on_message, self._on_refused = on_message, on_refused
        self._lock = threading.Lock()
        self._addresses: dict[int, Address] = {}
        self._links: dict[int, _Link] = {}
        """The connection over which each peer is sent to."""
        self._all: set[_Link] = set()
        """All connections: if two peers connect at once, they have two, until the one that neither uses is closed."""
        self._dialing: dict[int, Dialing | None] = {}
        self._early: dict[int, bytearray] = {}
        """What is to be sent to each peer to which a connection is being made."""
        self._retry_at: dict[int, float] = {}
        self._backoff_s: dict[int, float] = {}
        self._wants_write: set[_Link] = set()
        self._closed = False
        self.num_dropped = 0
        """Messages that were not sent: no connection, or a peer that does not read."""
        self.loop = listener.loop
        self.loop.on_close.append(self._close_all)
        self.loop.call_soon(self._close_idle)
        listener.register(PURPOSE, self._accept)

    # From any thread

    def set_address(self, rank: int, address: Address) -> None:
        """Note where worker ``rank`` listens: an address, not a name, since looking that up may block."""
        with self._lock:
            if self._addresses.get(rank) != address:
                self._addresses[rank] = address
                self._retry_at.pop(rank, None)
                self._backoff_s.pop(rank, None)

    def connected(self, rank: int) -> bool:
        return rank in self._links

    def send(self, rank: int, message: bytes) -> bool:
        """Queue a message; return False if it was dropped: the peer does not read, or cannot be reached now."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has {len(message)} bytes: expected at most {MAX_MESSAGE_BYTES}")
        framed = _LENGTH.pack(len(message)) + message
        with self._lock:
            link = self._links.get(rank)
            if link is not None:
                if len(link.outgoing) + len(framed) <= MAX_QUEUED_BYTES:
                    link.outgoing += framed
                    self._flush_soon(link)
                    return True
            elif self._dials(rank):
                early = self._early.setdefault(rank, bytearray())
                if len(early) + len(framed) <= MAX_EARLY_BYTES:
                    early += framed
                    return True
            self.num_dropped += 1
        return False

    def _flush_soon(self, link: _Link) -> None:
        if link not in self._wants_write:
            self._wants_write.add(link)
            self.loop.call_soon(lambda: self._flush(link))

    def _dials(self, rank: int) -> bool:
        """Return whether a connection is being made; begin if that is due."""
        if rank not in self._dialing:
            due = self._retry_at.get(rank, 0.0) <= time.monotonic()
            if self._closed or not due or rank not in self._addresses:
                return False
            self._dialing[rank] = None
            self.loop.call_soon(lambda: self._connect(rank))
        return True

    def disconnect(self, rank: int) -> None:
        """Close the connections to ``rank``: the next message opens a new one."""
        self.loop.call_soon(lambda: self._disconnect(rank))

    def close(self) -> None:
        """Close all connections once what is queued has been sent, as far as the peers take it at once."""
        self._closed = True
        self._listener.unregister(PURPOSE)
        self.loop.call_soon(self._close_all)

    # In the thread of the loop

    def _connect(self, rank: int) -> None:
        if self._closed:
            return
        address = self._addresses[rank]
        self._dialing[rank] = Dialing(
            self.loop,
            address,
            PURPOSE,
            self._about,
            identity=self._identity,
            timeout_s=CONNECT_TIMEOUT_S,
            on_ready=lambda connection: self._connected(rank, connection),
            on_failed=lambda error: self._not_connected(rank, address, error),
        )

    def _connected(self, rank: int, connection: Connection) -> None:
        if connection.peer_rank != rank:
            # Another worker has this address by now.
            connection.close()
            self._failed(rank)
            return
        with self._lock:
            self._dialing.pop(rank, None)
            self._backoff_s.pop(rank, None)
        self._add(_Link(rank, connection, self._is_below(rank)))

    def _not_connected(self, rank: int, address: Address, error: OSError) -> None:
        self._failed(rank)
        if isinstance(error, ConnectionRefusedError) and not self._closed:
            self._on_refused(rank, address)

    def _failed(self, rank: int) -> None:
        with self._lock:
            self._dialing.pop(rank, None)
            self.num_dropped += self._early.pop(rank, None) is not None
            backoff_s = self._backoff_s.get(rank, MIN_BACKOFF_S)
            self._backoff_s[rank] = min(2 * backoff_s, MAX_BACKOFF_S)
            self._retry_at[rank] = time.monotonic() + backoff_s * random.uniform(0.5, 1.0)

    def _accept(self, connection: Connection, hello: bytes) -> None:
        """Take over a connection that a peer has made."""
        if connection.peer_rank is None or hello != self._about or self._closed:
            connection.close()
            return
        self._add(_Link(connection.peer_rank, connection, not self._is_below(connection.peer_rank)))

    def _is_below(self, rank: int) -> bool:
        return self._identity.rank is not None and self._identity.rank < rank

    def _disconnect(self, rank: int) -> None:
        for link in [link for link in self._all if link.rank == rank]:
            self._drop(link)

    def _add(self, link: _Link) -> None:
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            link.connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ACKNOWLEDGED_MS)
        with self._lock:
            if self._closed:
                link.connection.close()
                return
            self._all.add(link)
            other = self._links.get(link.rank)
            same = other is not None and other.connection.peer_incarnation == link.connection.peer_incarnation
            if other is None or link.preferred or not same or not other.preferred:
                self._links[link.rank] = link
            early = self._early.pop(link.rank, None)
            if early is not None:
                link.outgoing += early
                self._flush_soon(link)
        self._watch(link)

    def _watch(self, link: _Link) -> None:
        events = READ | WRITE if link in self._wants_write else READ
        self.loop.watch(link.connection, events, lambda ready: self._ready(link, ready))

    def _ready(self, link: _Link, events: int) -> None:
        if events & READ:
            self._read(link)
        if events & WRITE and link in self._all:
            self._flush(link)

    def _flush(self, link: _Link) -> None:
        try:
            with self._lock:
                while link.outgoing:
                    sent = link.connection.send_some(bytes(link.outgoing[:READ_BYTES]))
                    if sent is None:
                        break
                    del link.outgoing[:sent]
                    link.used = time.monotonic()
                if not link.outgoing:
                    self._wants_write.discard(link)
        except OSError:
            self._drop(link)
            return
        if link in self._all:
            self._watch(link)

    def _read(self, link: _Link) -> None:
        buffer = bytearray(READ_BYTES)
        for _ in range(READS_PER_TURN):
            try:
                received = link.connection.receive_some(buffer)
            except OSError:
                self._drop(link)
                return
            if received is None:
                return
            link.used = time.monotonic()
            link.incoming += buffer[:received]
            if not self._deliver(link):
                self._drop(link)
                return
        if link.connection.is_tls:
            # What TLS has decrypted already does not make the socket readable.
            self.loop.call_soon(lambda: self._read(link) if link in self._all else None)

    def _deliver(self, link: _Link) -> bool:
        """Hand over the complete messages; False if what came is none."""
        while len(link.incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(link.incoming)
            if length > MAX_MESSAGE_BYTES:
                return False
            end = _LENGTH.size + length
            if len(link.incoming) < end:
                break
            message = bytes(link.incoming[_LENGTH.size : end])
            del link.incoming[:end]
            try:
                self._on_message(link.rank, message)
            except Exception:
                logger.exception("a message of worker %d could not be handled", link.rank)
        return True

    def _drop(self, link: _Link) -> None:
        self.loop.unwatch(link.connection)
        link.connection.close()
        with self._lock:
            self._all.discard(link)
            self._wants_write.discard(link)
            if self._links.get(link.rank) is link:
                del self._links[link.rank]
                others = [other for other in self._all if other.rank == link.rank]
                if others:
                    self._links[link.rank] = others[0]

    def _close_idle(self) -> None:
        now = time.monotonic()
        for link in list(self._all):
            if now - link.used > (IDLE_S if self._links.get(link.rank) is link else SPARE_IDLE_S):
                self._drop(link)
        if not self._closed:
            self.loop.call_later(IDLE_S / 4, self._close_idle)

    def _close_all(self) -> None:
        for link in list(self._all):
            self._flush(link)
            self._drop(link)
        for dialing in list(self._dialing.values()):
            if dialing is not None:
                dialing.cancel()
        self._dialing.clear()
