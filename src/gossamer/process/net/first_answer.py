"""Connects to the first of several addresses that answers, without waiting for those that do not.

As RFC 8305 does it for the addresses of one host: an attempt begins a little after the one before it, or at once when
that one has failed, and those in progress go on. Each time as many begin as have begun before, so that many addresses
that swallow everything cost little more than few.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from gossamer.process.net.connection import Address, Connection
from gossamer.process.net.dialing import Dialing
from gossamer.process.net.identity import Identity
from gossamer.process.net.loop import Loop, Timer

STEP_S = 0.2
"""How long the newest attempts have before more begin."""

PREFER_S = 0.2
"""How long earlier addresses have once a later one has answered."""

Found = tuple[Address, Connection]


class FirstAnswer:
    """Connects to one of ``addresses``, earlier ones preferred. All but the constructor runs in the loop's thread."""

    def __init__(
        self, loop: Loop, addresses: Sequence[Address], purpose: str, *, identity: Identity, timeout_s: float
    ) -> None:
        """``addresses``: no names, since looking one up may block. ``timeout_s``: of each attempt."""
        self.result: Future[Found | None] = Future()
        """Address and connection; None if none of them answers."""
        self._loop, self._addresses, self._purpose = loop, list(addresses), purpose
        self._identity, self._timeout_s = identity, timeout_s
        self._num_begun = 0
        self._dialing: dict[int, Dialing] = {}
        self._found: dict[int, Connection] = {}
        self._step: Timer | None = None
        self._over = False
        loop.call_soon(self._begin_more)

    def give_up(self) -> None:
        """Look no further, in any thread."""
        self._loop.call_soon(self._end)

    def _begin_more(self) -> None:
        if self._over or self._found:
            return
        if self._step is not None:
            self._step.cancel()
        begun = self._num_begun
        self._num_begun = min(len(self._addresses), max(1, 2 * begun))
        for number in range(begun, self._num_begun):
            self._dial(number)
        if self._num_begun < len(self._addresses):
            self._step = self._loop.call_later(STEP_S, self._begin_more)
        self._end_if_decided()

    def _dial(self, number: int) -> None:
        self._dialing[number] = Dialing(
            self._loop,
            self._addresses[number],
            self._purpose,
            b"",
            identity=self._identity,
            timeout_s=self._timeout_s,
            on_ready=lambda connection: self._answered(number, connection),
            on_failed=lambda error: self._failed(number),
        )

    def _answered(self, number: int, connection: Connection) -> None:
        if self._over:
            connection.close()
            return
        self._dialing.pop(number, None)
        self._found[number] = connection
        self._end_if_decided()
        if not self._over and len(self._found) == 1:
            self._loop.call_later(PREFER_S, self._end)

    def _failed(self, number: int) -> None:
        if self._over:
            return
        self._dialing.pop(number, None)
        if not self._dialing and not self._found and self._num_begun < len(self._addresses):
            self._begin_more()
        else:
            self._end_if_decided()

    def _end_if_decided(self) -> None:
        """End if no attempt in progress could change the result."""
        best = min(self._found, default=None)
        if best is None:
            if not self._dialing and self._num_begun == len(self._addresses):
                self._end()
        elif all(number > best for number in self._dialing):
            self._end()

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        if self._step is not None:
            self._step.cancel()
        for dialing in self._dialing.values():
            dialing.cancel()
        best = min(self._found, default=None)
        for number, connection in self._found.items():
            if number != best:
                connection.close()
        self.result.set_result(None if best is None else (self._addresses[best], self._found[best]))
