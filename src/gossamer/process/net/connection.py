"""A connection between two processes of a run, over TCP or TLS."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from gossamer.process.net import greeting
from gossamer.process.net.greeting import Greeted, Reason, Refused
from gossamer.process.net.identity import Identity

Address = tuple[str, int]
Buffer = bytes | bytearray | memoryview

BULK_WAIT_S = 0.25
"""How long a call for bulk blocks at most."""

_BULK_TIMEOUT = struct.pack("ll", 0, int(BULK_WAIT_S * 1e6))
"""The same as a ``struct timeval``."""

MAX_VECTORS = 64
"""So many buffers go out with one system call."""

_WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""All sockets of this package in this process."""


def own(sock: socket.socket) -> None:
    """Close ``sock`` in processes forked from this one, such as those of a data loader: they would keep it open."""
    _sockets.add(sock)


def _close_in_child() -> None:
    for sock in list(_sockets):
        with contextlib.suppress(OSError):
            sock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class Connection:
    """One connection. Any number of threads may use it; at most one sends and one receives at a time.

    Deadlines are values of ``time.monotonic()``; None: no deadline. After TimeoutError or ConnectionError, close it.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket; the other end is a stranger until ``greeted``."""
        self.socket = sock
        """Not blocking. With TLS an ``ssl.SSLSocket``, which has no ``sendmsg``."""
        self.peer_rank: int | None = None
        """The rank of the other end; None: it is no worker."""
        self.peer_incarnation = b""
        self.is_tls = isinstance(sock, ssl.SSLSocket)
        self._lock = threading.Lock()
        self._ssl_lock = threading.Lock()
        """OpenSSL allows one thread at a time in a connection."""
        self._users = 0
        self._closed = False
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own(sock)

    def greeted(self, peer: Greeted) -> None:
        """Note who the other end has proved to be."""
        self.peer_rank, self.peer_incarnation = peer.rank, peer.incarnation
        if not self.is_tls:
            # From here on calls of the socket block, unless they say otherwise: see the calls for bulk.
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                self.socket.setsockopt(socket.SOL_SOCKET, option, _BULK_TIMEOUT)
            os.set_blocking(self.socket.fileno(), True)

    @property
    def closed(self) -> bool:
        return self._closed

    def fileno(self) -> int:
        return self.socket.fileno()

    # With deadlines

    def send(self, *buffers: Buffer, deadline: float | None) -> None:
        """Send all of ``buffers``, one after the other. TimeoutError or ConnectionError if that does not succeed."""
        views = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
        with self.in_use():
            while views:
                sent = self._send_some(views)
                if sent is None:
                    self._wait(select.POLLOUT, deadline)
                    continue
                while views and sent >= views[0].nbytes:
                    sent -= views.pop(0).nbytes
                if sent:
                    views[0] = views[0][sent:]

    def receive_into(self, buffer: Buffer, deadline: float | None) -> None:
        """Fill ``buffer``. TimeoutError or ConnectionError if that does not succeed."""
        view = memoryview(buffer).cast("B")
        with self.in_use():
            while view.nbytes:
                received = self._receive_some(view)
                if received is None:
                    self._wait(select.POLLIN, deadline)
                else:
                    view = view[received:]

    def receive(self, num_bytes: int, deadline: float | None) -> bytes:
        """Return the next ``num_bytes``."""
        buffer = bytearray(num_bytes)
        self.receive_into(buffer, deadline)
        return bytes(buffer)

    # Without blocking

    def send_some(self, *buffers: Buffer) -> int | None:
        """Send what the kernel takes now and return how much that is; None: nothing."""
        with self.in_use():
            return self._send_some([memoryview(buffer).cast("B") for buffer in buffers])

    def receive_some(self, buffer: Buffer) -> int | None:
        """Receive what is there, at least a byte, and return how much that is; None: nothing.

        With TLS there may be more although the socket is not readable: call it until it returns None.
        """
        with self.in_use():
            return self._receive_some(memoryview(buffer).cast("B"))

    # For bulk, without TLS: a call blocks until all is done, without the interpreter's lock, for a limited time

    def send_bulk(self, view: memoryview) -> int:
        """Send a buffer; return how much of it was sent, which is less only if the time was up."""
        try:
            return self.socket.send(view)
        except _WOULD_BLOCK:
            return 0

    def receive_bulk(self, view: memoryview) -> int:
        """Fill a buffer; return how much of it was received, which is less only if the time was up."""
        try:
            received = self.socket.recv_into(view, 0, socket.MSG_WAITALL)
        except _WOULD_BLOCK:
            return 0
        if received == 0:
            raise ConnectionError("the other end has closed the connection")
        return received

    def has_heard(self) -> bool:
        """Return whether bytes of the other end are waiting to be read."""
        try:
            # Of the socket itself: an SSLSocket cannot peek.
            return bool(socket.socket.recv(self.socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def handshake_some(self) -> int | None:
        """Go on with the TLS handshake; return the event of ``select.poll`` to wait for, None once it is over."""
        if not isinstance(self.socket, ssl.SSLSocket):
            return None
        try:
            self.socket.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise Refused(Reason.CUT_OFF) from None
        except (OSError, ValueError):
            raise Refused(Reason.TLS) from None
        return None

    def close(self) -> None:
        """Close the connection. Threads that wait in it, at both ends, get a ConnectionError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._users == 0
        with contextlib.suppress(OSError):
            # Of the socket itself: that of an SSLSocket would forget its TLS first and then read what is not for it.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        if idle:
            self.socket.close()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the descriptor: one that is closed under a waiting thread may belong to another connection soon."""
        with self._lock:
            if self._closed:
                raise ConnectionError("the connection is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self.closed and self._users == 0
            if last:
                self.socket.close()

    def _send_some(self, views: list[memoryview]) -> int | None:
        try:
            if not self.is_tls:
                return self.socket.sendmsg(views[:MAX_VECTORS], (), socket.MSG_DONTWAIT)
            with self._ssl_lock:
                return self.socket.send(views[0])
        except _WOULD_BLOCK:
            return None
        except ssl.SSLError as error:
            raise ConnectionError(str(error)) from None

    def _receive_some(self, view: memoryview) -> int | None:
        try:
            if not self.is_tls:
                received = self.socket.recv_into(view, 0, socket.MSG_DONTWAIT)
            else:
                with self._ssl_lock:
                    received = self.socket.recv_into(view)
        except _WOULD_BLOCK:
            return None
        except ssl.SSLZeroReturnError:
            received = 0
        except ssl.SSLError as error:
            raise ConnectionError(str(error)) from None
        if received == 0:
            raise ConnectionError("the other end has closed the connection")
        return received

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self.socket.fileno(), event)
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError("the other end did not answer in time")
        poll.poll(None if left_s is None else left_s * 1000)
        if self._closed:
            raise ConnectionError("the connection is closed")


def connect(address: Address, purpose: str, hello: bytes, *, identity: Identity, timeout_s: float) -> Connection:
    """Return a connection to the process that listens at ``address``, with whom ``purpose`` has been agreed on.

    OSError if there is none in time: ConnectionError (Refused: one end does not accept the other) or TimeoutError.
    """
    deadline = time.monotonic() + timeout_s
    connection = Connection(wrap(socket.create_connection(address, timeout_s), identity, server_side=False))
    num_received = 0
    try:
        while (event := connection.handshake_some()) is not None:
            connection._wait(event, deadline)
        steps = greeting.ask(identity, lambda data: connection.send(data, deadline=deadline), purpose, hello)
        wanted = next(steps)
        while True:
            received = connection.receive(wanted, deadline)
            num_received += 1
            wanted = steps.send(received)
    except StopIteration as end:
        connection.greeted(end.value)
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, ConnectionError) and not isinstance(error, Refused):
            # With TLS the other end checks our certificate when our part of the handshake is over already.
            raise Refused(Reason.TLS if connection.is_tls and num_received == 0 else Reason.CUT_OFF) from None
        raise


def wrap(sock: socket.socket, identity: Identity, server_side: bool) -> socket.socket:
    """Put TLS around a socket if the run uses it. Its handshake is still to be made."""
    if identity.tls is None:
        return sock
    context: Any = identity.tls.server if server_side else identity.tls.client
    wrapped: socket.socket = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    return wrapped
