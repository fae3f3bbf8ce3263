"""Connects to another process on a loop, without blocking it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

from gossamer.process.net import greeting
from gossamer.process.net.connection import Address, Connection, own, wrap
from gossamer.process.net.greeting import Reason
from gossamer.process.net.identity import Identity
from gossamer.process.net.loop import WRITE, Loop
from gossamer.process.net.opening import Opening


class Dialing:
    """Connects to who listens at ``address``, then calls ``on_ready(connection)``, or ``on_failed(error)``.

    All in the thread of the loop, which calls at most one of the two, once.
    """

    def __init__(
        self,
        loop: Loop,
        address: Address,
        purpose: str,
        hello: bytes,
        *,
        identity: Identity,
        timeout_s: float,
        on_ready: Callable[[Connection], None],
        on_failed: Callable[[OSError], None],
    ) -> None:
        """``address``: no name, since looking that up may block: it fails. ``timeout_s``: to connect, then to greet."""
        self._loop, self._on_ready, self._on_failed = loop, on_ready, on_failed
        self._identity, self._purpose, self._hello, self._timeout_s = identity, purpose, hello, timeout_s
        self._over = self._is_cancelled = False
        try:
            sock = _begin_to_connect(address)
        except OSError as failure:
            # The caller does not know this object yet.
            self._over, error = True, failure
            loop.call_soon(lambda: None if self._is_cancelled else on_failed(error))
            return
        self._link: socket.socket | Connection = sock
        self._timer = loop.call_later(timeout_s, lambda: self._fail(TimeoutError(Reason.TOO_LATE)))
        loop.watch(sock, WRITE, lambda _: self._connected(sock))

    def cancel(self) -> None:
        """Give up without a word."""
        self._is_cancelled = True
        if not self._over:
            self._end()
            self._link.close()

    def _end(self) -> None:
        self._over = True
        self._timer.cancel()
        self._loop.unwatch(self._link)

    def _fail(self, error: OSError) -> None:
        if not self._over:
            self._end()
            self._link.close()
            self._on_failed(error)

    def _connected(self, sock: socket.socket) -> None:
        self._timer.cancel()
        self._loop.unwatch(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._fail(_to_error(error))
            return
        try:
            # Not before it is connected: a TLS socket would fail at once, and stay open.
            self._link = connection = Connection(wrap(sock, self._identity, server_side=False))
        except OSError as failure:
            self._fail(failure)
            return
        Opening(
            self._loop,
            connection,
            lambda send: greeting.ask(self._identity, send, self._purpose, self._hello),
            self._timeout_s,
            lambda _: self._opened(connection),
            self._fail,
        )

    def _opened(self, connection: Connection) -> None:
        if self._over:
            connection.close()
            return
        self._over = True
        self._on_ready(connection)


def _begin_to_connect(address: Address) -> socket.socket:
    """Return a socket on its way to ``address``. OSError if no descriptor is left, for example, or that is a name."""
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except ValueError as unreadable:
        raise OSError(errno.EINVAL, f"no address: {unreadable}") from None
    family, kind, protocol, _, numeric = found[0]
    sock = socket.socket(family, kind, protocol)
    own(sock)
    try:
        sock.setblocking(False)
        error = sock.connect_ex(numeric)
        if error not in (0, errno.EINPROGRESS):
            raise _to_error(error)
    except OSError:
        sock.close()
        raise
    return sock


def _to_error(number: int) -> OSError:
    if number == errno.ECONNREFUSED:
        return ConnectionRefusedError(number, "refused")
    return OSError(number, "cannot connect")
