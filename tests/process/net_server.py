"""A server for tests of connections, over real sockets in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from gossamer.process.net.connection import Connection, connect
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener

HOST = "127.0.0.1"
SECRET = b"a secret of some length"


class Server:
    """A listener that keeps the connections it is given."""

    def __init__(self, identity: Identity) -> None:
        self.lines: list[str] = []
        self.listener = Listener(HOST, identity=identity, on_refused=self.lines.append)
        self.accepted: list[tuple[Connection, bytes]] = []
        self.arrived = threading.Semaphore(0)
        self.listener.register("test", self.accept)

    def accept(self, connection: Connection, hello: bytes) -> None:
        self.accepted.append((connection, hello))
        self.arrived.release()

    def connect(self, identity: Identity, purpose: str = "test", timeout_s: float = 20.0) -> Connection:
        return connect(self.listener.address, purpose, b"hello", identity=identity, timeout_s=timeout_s)

    def pair(self, identity: Identity) -> tuple[Connection, Connection]:
        """Both ends of a new connection."""
        ours = self.connect(identity)
        assert self.arrived.acquire(timeout=60)
        return ours, self.accepted[-1][0]

    def close(self) -> None:
        self.listener.close()
        for connection, _ in self.accepted:
            connection.close()


def soon(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return False
