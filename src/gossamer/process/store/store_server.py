"""A small key-value store, served by the thread of a listener."""

from __future__ import annotations

import re
from collections import defaultdict

from gossamer.process.net.connection import Connection
from gossamer.process.net.listener import Listener
from gossamer.process.net.loop import READ, WRITE, Timer
from gossamer.process.store import store_messages
from gossamer.process.store.store_messages import PURPOSE, Items, Message, Operation

READ_BYTES = 256 * 1024
MAX_UNREAD_BYTES = 2 * store_messages.MAX_FRAME_BYTES
"""A client that leaves more answers unread is dropped."""

_NUMBER = re.compile(rb"-?[0-9]{1,18}")


class _Client:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.incoming, self.outgoing = bytearray(), bytearray()
        self.waiting: set[_Wait] = set()


class _Wait:
    """A request that is answered once its keys have values."""

    def __init__(self, client: _Client, request: Message, missing: set[bytes]) -> None:
        self.client, self.request, self.missing = client, request, missing
        self.timer: Timer | None = None


class StoreServer:
    """Serves a store to all who connect to ``listener``."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._loop = listener, listener.loop
        self._values: dict[bytes, bytes] = {}
        self._waits: dict[bytes, set[_Wait]] = defaultdict(set)
        self._clients: set[_Client] = set()
        self.num_requests = 0
        self._loop.on_close.append(self._close)
        listener.register(PURPOSE, self._accept)

    def close(self) -> None:
        """Serve no more; in any thread."""
        self._listener.unregister(PURPOSE)
        self._loop.call_soon(self._close)

    def _accept(self, connection: Connection, hello: bytes) -> None:
        client = _Client(connection)
        self._clients.add(client)
        self._loop.watch(connection, READ, lambda events: self._serve(client, events))

    def _close(self) -> None:
        for client in list(self._clients):
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        self._loop.unwatch(client.connection)
        client.connection.close()
        for wait in list(client.waiting):
            self._end(wait)

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & READ:
                self._read(client)
            self._flush(client)
        except (OSError, ValueError):
            # It has gone, or does not speak as a member does.
            self._drop(client)

    def _read(self, client: _Client) -> None:
        buffer = bytearray(READ_BYTES)
        while (received := client.connection.receive_some(buffer)) is not None:
            client.incoming += memoryview(buffer)[:received]
            while (request := store_messages.take(client.incoming)) is not None:
                self.num_requests += 1
                self._handle(client, request)

    def _flush(self, client: _Client) -> None:
        while client.outgoing:
            sent = client.connection.send_some(bytes(client.outgoing[:READ_BYTES]))
            if sent is None:
                break
            del client.outgoing[:sent]
        if len(client.outgoing) > MAX_UNREAD_BYTES:
            raise ValueError("it does not read")
        events = READ | WRITE if client.outgoing else READ
        self._loop.watch(client.connection, events, lambda events: self._serve(client, events))

    def _handle(self, client: _Client, request: Message) -> None:
        items = [item for item in request.items if item is not None]
        if request.operation in (Operation.GET, Operation.HAS):
            missing = {key for key in items if key not in self._values} if request.wait_s > 0 else set()
            if missing:
                self._wait(client, request, missing)
            else:
                self._answer(client, request, self._look_up(request))
        elif request.operation == Operation.SET:
            if len(items) % 2:
                raise ValueError("a key without a value")
            for key, value in zip(items[::2], items[1::2], strict=True):
                self._put(key, value)
            self._answer(client, request, [])
        elif request.operation == Operation.COMPARE_SET:
            key, expected, value = items
            if self._values.get(key, b"") == expected:
                self._put(key, value)
            self._answer(client, request, [self._values.get(key)])
        elif request.operation == Operation.ADD:
            self._answer(client, request, [self._add(*items)])
        else:
            raise ValueError("not a request")

    def _look_up(self, request: Message) -> Items:
        values = [self._values.get(key or b"") for key in request.items]
        return values if request.operation == Operation.GET else [None if v is None else b"" for v in values]

    def _add(self, key: bytes, amount: bytes) -> bytes | None:
        before = self._values.get(key, b"0")
        if not _NUMBER.fullmatch(before) or not _NUMBER.fullmatch(amount):
            return None
        self._put(key, b"%d" % (int(before) + int(amount)))
        return self._values[key]

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for wait in list(self._waits.get(key, ())):
            wait.missing.discard(key)
            if not wait.missing:
                self._end_wait(wait)

    def _wait(self, client: _Client, request: Message, missing: set[bytes]) -> None:
        wait = _Wait(client, request, missing)
        for key in missing:
            self._waits[key].add(wait)
        client.waiting.add(wait)
        wait.timer = self._loop.call_later(request.wait_s, lambda: self._end_wait(wait))

    def _end_wait(self, wait: _Wait) -> None:
        self._end(wait)
        self._answer(wait.client, wait.request, self._look_up(wait.request))
        # The client is not the one that is served now, if any.
        self._loop.call_soon(lambda: self._serve(wait.client, 0) if wait.client in self._clients else None)

    def _end(self, wait: _Wait) -> None:
        wait.client.waiting.discard(wait)
        if wait.timer is not None:
            wait.timer.cancel()
        for key in wait.request.items:
            if key is not None and key in self._waits:
                self._waits[key].discard(wait)
                if not self._waits[key]:
                    del self._waits[key]

    def _answer(self, client: _Client, request: Message, items: Items) -> None:
        client.outgoing += store_messages.encode(request.number, Operation.ANSWER, items)
