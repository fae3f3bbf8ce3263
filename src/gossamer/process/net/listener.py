"""The one listening port of a process. Who connects is greeted first, then handed to whoever serves its purpose."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable

from gossamer.process.net import greeting
from gossamer.process.net.connection import Address, Connection, own, wrap
from gossamer.process.net.greeting import Greeted, Reason, Refused
from gossamer.process.net.identity import Identity
from gossamer.process.net.loop import READ, Loop
from gossamer.process.net.opening import Opening

GREETING_TIMEOUT_S = 10.0
MAX_OPENINGS = 128
"""So many connections may be in their greeting at once. One more closes an old one: members need milliseconds."""

BACKLOG = 1024
MAX_ACCEPTS = 64
"""At a time: connections that are open already have their turn between."""

PAUSE_S = 0.1
"""How long nobody is let in after the process ran out of descriptors."""

Accept = Callable[[Connection, bytes], None]


class Listener:
    """Listens at one address, in one thread."""

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        identity: Identity,
        on_refused: Callable[[str], None] = lambda text: None,
        loop: Loop | None = None,
    ) -> None:
        """OSError if that is not possible. ``on_refused(text)`` is told once for each reason of a refusal.

        ``loop``: whose thread listens; by default one of its own.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        own(self._socket)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()[:2]
        self.identity = identity
        self.refusals: Counter[Reason] = Counter()
        """How many connections were refused, by reason. One that was closed before its first byte does not count."""
        self.on_refused = on_refused
        self._purposes: dict[str, Accept] = {}
        self._openings: dict[Opening, str] = {}
        """Those in progress, oldest first, and from which host."""
        self._owns_loop = loop is None
        self.loop = loop or Loop("gossamer-listener")
        self.loop.on_close.append(self._close)

    def register(self, purpose: str, accept: Accept) -> None:
        """Call ``accept(connection, hello)``, which must not block, for connections of ``purpose``.

        Nobody is let in before the first purpose is known: who comes early waits, instead of being refused.
        """
        begins = not self._purposes
        self._purposes[purpose] = accept
        if begins:
            self.loop.call_soon(self._listen)

    def unregister(self, purpose: str) -> None:
        self._purposes.pop(purpose, None)

    def close(self) -> None:
        """Stop listening. Connections that were handed over stay open."""
        if self._owns_loop:
            self.loop.close()
        else:
            self.loop.call_soon(self._close)

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            self.loop.watch(self._socket, READ, self._accept)

    def _close(self) -> None:
        self.loop.unwatch(self._socket)
        self._socket.close()
        for opening in list(self._openings):
            opening.connection.close()

    def _accept(self, _: int) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                sock, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                # No descriptor is left. The socket stays readable, so look away for a while.
                self._drop_oldest()
                self.loop.unwatch(self._socket)
                self.loop.call_later(PAUSE_S, self._listen)
                return
            self._open(sock, str(address[0]))

    def _open(self, sock: socket.socket, host: str) -> None:
        sock.setblocking(False)
        try:
            connection = Connection(wrap(sock, self.identity, server_side=True))
        except OSError:
            sock.close()
            return
        opening = Opening(
            self.loop,
            connection,
            lambda send: greeting.answer(self.identity, send, self._purposes.__contains__),
            GREETING_TIMEOUT_S,
            lambda peer: self._opened(opening, peer),
            lambda error: self._refused(opening, error),
        )
        self._openings[opening] = host
        if len(self._openings) > MAX_OPENINGS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Close the oldest connection that has not said anything; the oldest, if all have."""
        oldest = next((opening for opening in self._openings if opening.silent), next(iter(self._openings), None))
        if oldest is not None:
            oldest.fail(Refused(Reason.TOO_MANY))

    def _opened(self, opening: Opening, peer: Greeted) -> None:
        del self._openings[opening]
        accept = self._purposes.get(peer.purpose)
        if accept is None:
            opening.connection.close()
            return
        try:
            accept(opening.connection, peer.hello)
        except BaseException:
            opening.connection.close()
            raise

    def _refused(self, opening: Opening, error: OSError) -> None:
        host = self._openings.pop(opening, "")
        reason = error.reason if isinstance(error, Refused) else Reason.TOO_LATE
        if reason == Reason.CUT_OFF and opening.silent:
            return
        self.refusals[reason] += 1
        if self.refusals[reason] == 1:
            self.on_refused(f"refused a connection from {host}: {reason}")
