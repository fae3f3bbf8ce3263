"""A client of a key-value store. Any number of threads may ask at once; one that waits for a key blocks no other."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from gossamer.process.net.connection import Address, Connection, connect
from gossamer.process.net.identity import Identity
from gossamer.process.net.loop import READ, Loop
from gossamer.process.store import store_messages
from gossamer.process.store.store_messages import MAX_WAIT_S, PURPOSE, Items, Operation

ANSWER_TIMEOUT_S = 3.0
"""A store that has not answered for this long counts as dead."""

READ_BYTES = 256 * 1024


class StoreClient:
    """One connection to a store. Its methods raise OSError if the store does not answer."""

    def __init__(self, connection: Connection, loop: Loop) -> None:
        """``connection``: to a store. ``loop``: receives the answers."""
        self._connection = connection
        self.peer_incarnation = connection.peer_incarnation
        host, port, *_ = connection.socket.getpeername()
        self.peer_address: Address = (host, port)
        """Where the store is, without a name."""
        self._loop = loop
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._pending: dict[int, Future[list[bytes | None]]] = {}
        self._incoming = bytearray()
        loop.call_soon(lambda: loop.watch(self._connection, READ, self._receive))

    @classmethod
    def connect(cls, address: Address, identity: Identity, loop: Loop, timeout_s: float) -> StoreClient:
        """Connect to the store at ``address``; OSError if that takes longer than ``timeout_s``."""
        connection = connect(address, PURPOSE, b"", identity=identity, timeout_s=timeout_s)
        try:
            return cls(connection, loop)
        except OSError:
            connection.close()
            raise

    def set(self, values: Mapping[str, bytes]) -> None:
        self._call(Operation.SET, [part for key, value in values.items() for part in (key.encode(), value)])

    def get(self, keys: Sequence[str], wait_s: float = 0.0) -> list[bytes | None]:
        """Return the values of ``keys``, once all have one or after ``wait_s``."""
        return self._call(Operation.GET, [key.encode() for key in keys], wait_s)

    def has(self, keys: Sequence[str], wait_s: float = 0.0) -> bool:
        """Return whether all ``keys`` have a value, now or within ``wait_s``."""
        return None not in self._call(Operation.HAS, [key.encode() for key in keys], wait_s)

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes | None:
        """Set ``key`` if its value is ``expected`` (empty: if it has none); return its value afterwards."""
        return self._call(Operation.COMPARE_SET, [key.encode(), expected, value])[0]

    def add(self, key: str, amount: int) -> int | None:
        """Add to a counter and return its new value; None if it is no number."""
        value = self._call(Operation.ADD, [key.encode(), b"%d" % amount])[0]
        return None if value is None else int(value)

    def close(self) -> None:
        """Close the connection. Threads that wait for an answer get a ConnectionError."""
        self._loop.call_soon(self._close)

    def _call(self, operation: Operation, items: Items, wait_s: float = 0.0) -> list[bytes | None]:
        assert not self._loop.is_current, "the thread that receives the answers cannot wait for one"
        wait_s = min(wait_s, MAX_WAIT_S)
        answer: Future[list[bytes | None]] = Future()
        number = next(self._numbers)
        with self._lock:
            self._pending[number] = answer
        try:
            request = store_messages.encode(number, operation, items, wait_s)
            with self._sending:
                self._connection.send(request, deadline=time.monotonic() + ANSWER_TIMEOUT_S)
            return answer.result(ANSWER_TIMEOUT_S + wait_s)
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def _receive(self, _: int) -> None:
        buffer = bytearray(READ_BYTES)
        try:
            while (received := self._connection.receive_some(buffer)) is not None:
                self._incoming += memoryview(buffer)[:received]
                while (answer := store_messages.take(self._incoming)) is not None:
                    with self._lock:
                        future = self._pending.pop(answer.number, None)
                    if future is not None:
                        future.set_result(answer.items)
        except (OSError, ValueError):
            self._close()

    def _close(self) -> None:
        self._loop.unwatch(self._connection)
        self._connection.close()
        with self._lock:
            pending, self._pending = self._pending, {}
        for future in pending.values():
            with contextlib.suppress(Exception):
                future.set_exception(ConnectionError("the store has closed the connection"))
