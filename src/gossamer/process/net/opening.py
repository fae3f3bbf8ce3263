"""A connection in the making: TLS handshake and greeting on a loop, without blocking it."""

from __future__ import annotations

import select
from collections.abc import Callable

from gossamer.process.net.connection import Connection
from gossamer.process.net.greeting import Greeted, Reason, Refused, Steps
from gossamer.process.net.loop import READ, WRITE, Loop


class Opening:
    """Makes ``connection`` ready for use, then calls ``on_ready(peer)``; ``on_failed(error)`` closed it, if it failed.

    All in the thread of the loop, which calls exactly one of the two, once.
    """

    def __init__(
        self,
        loop: Loop,
        connection: Connection,
        make_steps: Callable[[Callable[[bytes], None]], Steps],
        timeout_s: float,
        on_ready: Callable[[Greeted], None],
        on_failed: Callable[[OSError], None],
    ) -> None:
        """``make_steps(send)``: one side of the greeting."""
        self._loop, self.connection = loop, connection
        self._on_ready, self._on_failed = on_ready, on_failed
        self._steps = make_steps(self._send)
        self._received = bytearray()
        self._wanted = 0
        self._over = False
        self.silent = True
        """The other end has not sent a byte yet."""
        self._timer = loop.call_later(timeout_s, lambda: self.fail(TimeoutError(Reason.TOO_LATE)))
        loop.watch(connection, READ | WRITE, self._go_on)

    def fail(self, error: OSError) -> None:
        if not self._over:
            self._end()
            self.connection.close()
            self._on_failed(error)

    def _end(self) -> None:
        self._over = True
        self._timer.cancel()
        self._loop.unwatch(self.connection)

    def _go_on(self, _: int) -> None:
        try:
            self.silent = self.silent and not self.connection.has_heard()
            event = self.connection.handshake_some()
            if event is None:
                self._greet()
            else:
                self._loop.watch(self.connection, READ if event == select.POLLIN else WRITE, self._go_on)
        except Refused as error:
            self.fail(error)
        except OSError:
            self.fail(Refused(Reason.CUT_OFF))

    def _greet(self) -> None:
        if not self._wanted:
            # The end that connects sends first.
            self._wanted = next(self._steps)
            self._loop.watch(self.connection, READ, self._go_on)
        while True:
            missing = bytearray(self._wanted - len(self._received))
            received = self.connection.receive_some(missing)
            if received is None:
                return
            # They may have arrived after the look at what is waiting.
            self.silent = False
            self._received += missing[:received]
            if len(self._received) < self._wanted:
                continue
            data, self._received = bytes(self._received), bytearray()
            try:
                self._wanted = self._steps.send(data)
            except StopIteration as end:
                self._end()
                self.connection.greeted(end.value)
                self._on_ready(end.value)
                return

    def _send(self, data: bytes) -> None:
        # Fits into the empty buffer of a new connection.
        if self.connection.send_some(data) != len(data):
            raise Refused(Reason.CUT_OFF)
