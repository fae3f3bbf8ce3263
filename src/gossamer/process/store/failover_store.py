"""A key-value store that fails over.

A run starts at one store, the home store. Every worker also serves a *spare* store on its listening port and publishes
its address. When the store in use dies or stops answering, workers move to the first spare that answers, in rank order,
and back to an earlier one as soon as that answers. Training needs nothing from the store: it only serves to build new
connections. So each worker simply republishes its own entries after a move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gossamer.process.net.connection import Address
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.net.loop import Loop
from gossamer.process.store.home_store import Home, HomeStoreWait, Host, release_home
from gossamer.process.store.introduction import introduce
from gossamer.process.store.store_client import StoreClient
from gossamer.process.store.store_server import StoreServer

CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.5
HOPELESS_CHECK_S = 0.3
"""How often a wait for a key checks whether the key can still appear."""

ANNOUNCEMENT = "announcement"
"""A key without the prefix of a run."""

T = TypeVar("T")


class FailoverStore:
    """A client of one store at a time: the home store, or the first spare that answers."""

    def __init__(
        self,
        home: Home,
        identity: Identity,
        prefix: str,
        timeout_s: float,
        on_wait: Callable[[str], None] = lambda text: None,
        on_refused: Callable[[str], None] = lambda text: None,
        reached_at: Address | None = None,
    ) -> None:
        """Host the home store, or connect to it. ``on_wait(text)`` is told what a longer wait is for, and
        ``on_refused(text)`` once for each reason why a stranger was refused. ``reached_at``: the store to begin with,
        if it is another one than the home store.

        InputError if there is no store within ``timeout_s``.
        """
        self.identity, self.prefix, self._on_refused = identity, prefix, on_refused
        self.spares: dict[int, Address] = {}
        """The addresses at which the workers listen, by rank. Each serves a spare store there."""
        self.on_move: list[Callable[[], None]] = []
        """Called after a move to another store: every user republishes its entries."""
        self.listener: Listener | None = None
        """The listening port of this worker."""
        self._lock = threading.RLock()
        self._tried = 0.0
        self._num_attempts = 0
        self._attempting = False
        self._closed = False
        self.loop = Loop("gossamer-net")
        first = home if reached_at is None else home._replace(host=reached_at[0], port=reached_at[1])
        wait = HomeStoreWait(first, identity, timeout_s, on_wait)
        hosting = home.hosted_by != Host.LAUNCHER and identity.rank == 0
        self._hosted = None
        try:
            wait.until_resolved()
            if hosting:
                self._hosted = wait.until_hosted(on_refused)
            else:
                wait.until_found()
            self._current = wait.address
            self.home = self._current if reached_at is None else (home.host, home.port)
            self._client: StoreClient | None = wait.until_connected(self.loop, self._hosted)
        except BaseException:
            self._client = None
            self.close()
            raise

    def listen(self, host: str) -> Listener:
        """Listen at ``host``, on any port, and serve a spare store there."""
        self.listener = Listener(host, identity=self.identity, on_refused=self._on_refused, loop=self.loop)
        StoreServer(self.listener)
        introduce(self.listener, lambda: (self.home, self._current))
        return self.listener

    @property
    def hosted_here(self) -> bool:
        """Whether the store in use is one of this process."""
        own = self.listener.address if self.listener is not None else None
        return self._current == own or (self._hosted is not None and self._current == self.home)

    @property
    def num_refused(self) -> int:
        """How many connections of strangers were refused, at the listening port and at the home store if it is here."""
        listeners = [self.listener, None if self._hosted is None else self._hosted.listener]
        return sum(listener.refusals.total() for listener in listeners if listener is not None)

    # Requests; all of them return None or False if no store can be reached

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``; None if it has none."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of several keys, with one request."""
        names = [self.prefix + key for key in keys]
        return self._call(lambda client: client.get(names)) or [None] * len(names)

    def has_all(self, keys: Sequence[str], wait_s: float = 0.0) -> bool:
        """Return whether all ``keys`` have a value, now or within ``wait_s``."""
        names = [self.prefix + key for key in keys]
        return bool(self._call(lambda client: client.has(names, wait_s)))

    def set(self, key: str, value: str | bytes) -> bool:
        return self.set_all({key: value})

    def set_all(self, values: Mapping[str, str | bytes]) -> bool:
        """Set several keys, with one request."""
        named = {self.prefix + key: _to_bytes(value) for key, value in values.items()}

        def put(client: StoreClient) -> bool:
            client.set(named)
            return True

        return bool(self._call(put))

    def compare_set(self, key: str, value: str, expected: str = "") -> bytes | None:
        """Set ``key`` if its value is ``expected`` (empty: if it has none). Return its value afterwards."""
        name = self.prefix + key
        return self._call(lambda client: client.compare_set(name, expected.encode(), value.encode()))

    def add(self, key: str, amount: int) -> int | None:
        """Add to a counter and return its new value; None if it is no number."""
        return self._call(lambda client: client.add(self.prefix + key, amount))

    def announce(self, text: str) -> None:
        """Say what is going on at this store to processes that do not know the prefix yet."""
        self._call(lambda client: client.set({ANNOUNCEMENT: text.encode()}))

    def announced(self) -> bytes | None:
        """Return what was announced last."""
        values = self._call(lambda client: client.get([ANNOUNCEMENT]))
        return None if values is None else values[0]

    def for_group(self, timeout_s: float, hopeless: Callable[[], bool] = lambda: False) -> dist.Store:
        """Return a store to build a process group with. It waits for members until ``timeout_s`` or ``hopeless()``."""
        return _GroupStore(self, timeout_s, hopeless)

    def _call(self, request: Callable[[StoreClient], T]) -> T | None:
        client = self._reach()
        if client is None:
            return None
        try:
            return request(client)
        except OSError:
            self._disconnect(client)
            return None

    def close(self) -> None:
        """Close all connections, and the stores hosted here."""
        with self._lock:
            self._closed = True
            if self._client is not None:
                self._client.close()
            self._client = None
        self.loop.close()
        if self._hosted is not None:
            release_home(self._hosted)
            self._hosted = None

    # Failing over

    def move_to_earlier(self) -> None:
        """Move to a store that precedes the current one if it answers. Never blocks: call it again and again."""
        with self._lock:
            if self._attempting or self._closed or self._current == self.home:
                return
            if time.monotonic() - self._tried < RETRY_S:
                return
            addresses = self._addresses()
            earlier = addresses[: addresses.index(self._current) if self._current in addresses else None]
            self._tried = time.monotonic()
            self._num_attempts += 1
            self._attempting = True
            address = earlier[self._num_attempts % len(earlier)]
        threading.Thread(target=self._try_to_move, args=(address,), name="gossamer-store-move", daemon=True).start()

    def _try_to_move(self, address: Address) -> None:
        try:
            client = StoreClient(address, self.identity, self.loop, CONNECT_TIMEOUT_S)
        except OSError:
            return
        finally:
            self._attempting = False
        with self._lock:
            if self._closed:
                client.close()
                return
            if self._client is not None:
                self._client.close()
            self._client, self._current = client, address
        self._notify()

    def _addresses(self) -> list[Address]:
        return [self.home, *(address for _, address in sorted(self.spares.items()))]

    def _reach(self) -> StoreClient | None:
        """Return the client of the current store, or of the first one that answers."""
        with self._lock:
            if self._client is not None or self._closed or time.monotonic() - self._tried < RETRY_S:
                return self._client
            for address in self._addresses():
                try:
                    self._client = StoreClient(address, self.identity, self.loop, CONNECT_TIMEOUT_S)
                except OSError:
                    continue
                self._current = address
                break
            else:
                self._tried = time.monotonic()
                return None
            client = self._client
        self._notify()
        return client

    def _disconnect(self, client: StoreClient) -> None:
        with self._lock:
            client.close()
            if self._client is client:
                self._client = None

    def _notify(self) -> None:
        for callback in self.on_move:
            callback()


class _GroupStore(dist.Store):
    """The failover store in the form in which torch builds process groups with it."""

    def __init__(self, store: FailoverStore, timeout_s: float, hopeless: Callable[[], bool]) -> None:
        super().__init__()
        self._store, self._timeout_s, self._hopeless = store, timeout_s, hopeless

    def set(self, key: str, value: Any) -> None:
        if not self._store.set(key, value):
            raise RuntimeError("no store can be reached")

    def get(self, key: str) -> bytes:
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            began = time.monotonic()
            if self._store.has_all([key], HOPELESS_CHECK_S):
                value = self._store.get(key)
                if value is not None:
                    return value
            if self._hopeless():
                break
            if time.monotonic() - began < HOPELESS_CHECK_S / 2:
                # No store can be reached now.
                time.sleep(HOPELESS_CHECK_S / 2)
        raise RuntimeError(f"nobody published {key}")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.has_all(keys)

    def add(self, key: str, amount: int) -> int:
        value = self._store.add(key, amount)
        if value is None:
            raise RuntimeError("no store can be reached")
        return value


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
