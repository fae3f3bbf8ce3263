"""A key-value store that fails over.

A run starts at one store: torchrun's, or one that rank 0 hosts. Every worker also hosts a small *spare* store and
publishes its address. When the store in use dies or stops answering, workers move to the first spare that answers, in
rank order, and back to an earlier one as soon as that answers. Training needs nothing from the store: it only serves to
build new connections. So each worker simply republishes its own entries after a move.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from gossamer.process.daemon_executor import DaemonExecutor
from gossamer.process.store.home_store_wait import Address, HomeStoreWait

CONNECT_TIMEOUT_S = 1.0
SPARE_TIMEOUT_S = 60.0
"""A store in this process will start, however busy the machine is."""

ANSWER_TIMEOUT_S = 2.0
"""A store that has not answered for this long counts as dead."""

CLOSE_TIMEOUT_S = 4.0
"""Within this time a connection attempt has succeeded or failed."""

RETRY_S = 0.5
HOPELESS_CHECK_S = 0.3
"""How often a wait for a key checks whether the key can still appear."""

POLL_S = 0.005

T = TypeVar("T")


class _PollingStore(dist.Store):
    """The failover store in the form in which torch builds process groups with it.

    A wait on a TCPStore blocks everything else on its connection. A connection for each group is no way out: where many
    are opened at once some take seconds. This store polls over the one connection there is.
    """

    def __init__(self, store: FailoverStore, timeout_s: float, hopeless: Callable[[], bool]) -> None:
        super().__init__()
        self._store, self._timeout_s, self._hopeless = store, timeout_s, hopeless

    def set(self, key: str, value: Any) -> None:
        if not self._store.set(key, value):
            raise RuntimeError("no store can be reached")

    def get(self, key: str) -> bytes:
        checked = time.monotonic()
        until = checked + self._timeout_s
        while time.monotonic() < until:
            value = self._store.get(key)
            if value is not None:
                return value
            if time.monotonic() - checked > HOPELESS_CHECK_S:
                checked = time.monotonic()
                if self._hopeless():
                    break
            time.sleep(POLL_S)
        raise RuntimeError(f"nobody published {key}")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._store.get(key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        value = self._store.add(key, amount)
        if value is None:
            raise RuntimeError("no store can be reached")
        return value


class _StoreClient:
    """A connection to one store, used by a thread of its own.

    A store whose process is stopped never answers, and torch waits for it without end. The thread is abandoned then.
    """

    def __init__(self, connect: Callable[[], dist.TCPStore]) -> None:
        self._executor = DaemonExecutor("gossamer-store")
        self.connected = self._executor.submit(connect)

    def call(self, request: Callable[[dist.Store], T]) -> T:
        """Return the store's answer; RuntimeError if there is none in time."""
        try:
            return self._executor.submit(lambda: request(self.connected.result())).result(ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise RuntimeError(f"the store did not answer in {ANSWER_TIMEOUT_S} s") from None

    def close(self, timeout_s: float = 0.0) -> bool:
        return self._executor.close(timeout_s)


class FailoverStore:
    """A client of one store at a time: the home store, or the first spare that answers."""

    def __init__(
        self,
        host: str,
        port: int,
        hosting: bool,
        prefix: str,
        timeout_s: float,
        on_wait: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Host the home store, or connect to it. ``on_wait(text)`` is told what a longer wait is for.

        InputError if there is no store within ``timeout_s``.
        """
        self.prefix = prefix
        self.home: Address = (host, port)
        self.spares: dict[int, Address] = {}
        """The addresses of the workers' spare stores, by rank."""
        self.on_move: list[Callable[[], None]] = []
        """Called after a move to another store: every user republishes its entries."""
        self._lock = threading.RLock()
        self._current = self.home
        self._tried = 0.0
        self._closed = False
        wait = HomeStoreWait(self.home, timeout_s, on_wait)
        wait.until_resolved()
        self._hosted: list[dist.TCPStore] = []
        self._client: _StoreClient | None
        if hosting:
            self._client = _StoreClient(lambda: host_store(host, port, timeout_s))
            self._hosted.append(wait.hosted(self._client.connected))
        else:
            self._client = wait.until_connected(_StoreClient)
        self._attempt: tuple[Address, _StoreClient] | None = None
        """The connection attempt to an earlier store that is in progress."""
        self._num_attempts = 0
        self._abandoned: list[_StoreClient] = []
        """Clients without use whose threads may still run."""

    def host_spare(self, host: str) -> Address:
        """Start a spare store in this process and return its address."""
        spare = host_store(host, 0, SPARE_TIMEOUT_S)
        self._hosted.append(spare)
        return host, spare.port

    @property
    def hosted_here(self) -> bool:
        return any(store.port == self._current[1] for store in self._hosted)

    def for_group(self, timeout_s: float, hopeless: Callable[[], bool] = lambda: False) -> dist.Store:
        """Return a store to build a process group with. It waits for members until ``timeout_s`` or ``hopeless()``."""
        return _PollingStore(self, timeout_s, hopeless)

    def has_all(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` have a value; False if no store can be reached."""
        return bool(self._call(lambda store: store.check([self.prefix + key for key in keys])))

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if there is none or no store can be reached."""
        return self._call(lambda store: store.get(self.prefix + key) if store.check([self.prefix + key]) else None)

    def set(self, key: str, value: Any) -> bool:
        """Set ``key``; return False if no store can be reached."""

        def put(store: dist.Store) -> bool:
            store.set(self.prefix + key, value)
            return True

        return bool(self._call(put))

    def compare_set(self, key: str, value: str, expected: str = "") -> bytes | None:
        """Set ``key`` if its value is ``expected`` (empty: if it has none). Return its value afterwards."""
        return self._call(lambda store: store.compare_set(self.prefix + key, expected, value))

    def add(self, key: str, amount: int) -> int | None:
        """Add to a counter and return its new value."""
        return self._call(lambda store: store.add(self.prefix + key, amount))

    def _call(self, request: Callable[[dist.Store], T]) -> T | None:
        """Return the store's answer, or None if no store can be reached."""
        with self._lock:
            client = self._reach()
            if client is None:
                return None
            try:
                return client.call(request)
            except RuntimeError:
                self._disconnect()
                return None

    def close(self) -> None:
        """Close all connections, and the stores hosted here."""
        with self._lock:
            self._closed = True
            self._abandon(self._client, self._attempt and self._attempt[1])
            until = time.monotonic() + CLOSE_TIMEOUT_S
            for client in self._abandoned:
                client.close(max(until - time.monotonic(), 0.0))
            self._client, self._attempt, self._hosted = None, None, []

    def _addresses(self) -> list[Address]:
        return [self.home, *(address for _, address in sorted(self.spares.items()))]

    def listens(self, rank: int) -> bool:
        """Return False if the spare store of ``rank`` refuses connections: its process has ended."""
        try:
            socket.create_connection(self.spares[rank], CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return False
        except (OSError, KeyError):
            pass
        return True

    def answers(self, rank: int) -> bool:
        """Return whether the spare store of ``rank`` answers: its process runs and is not stopped."""
        address = self.spares.get(rank)
        if address is None:
            return False
        client = _StoreClient(partial(_connect, address))
        try:
            client.connected.result(CONNECT_TIMEOUT_S)
        except (RuntimeError, TimeoutError):
            return False
        finally:
            with self._lock:
                self._abandon(client)
        return True

    def move_to_earlier(self) -> None:
        """Move to a store that precedes the current one if it answers. Never blocks: call it again and again."""
        with self._lock:
            if self._attempt is None:
                if self._current == self.home or self._closed or time.monotonic() - self._tried < RETRY_S:
                    return
                addresses = self._addresses()
                earlier = addresses[: addresses.index(self._current) if self._current in addresses else None]
                self._tried = time.monotonic()
                self._num_attempts += 1
                address = earlier[self._num_attempts % len(earlier)]
                self._attempt = address, _StoreClient(partial(_connect, address))
            address, client = self._attempt
            if not client.connected.done():
                return
            self._attempt = None
            if client.connected.exception() is not None:
                self._abandon(client)
                return
            self._disconnect()
            self._client, self._current = client, address
        self._notify()

    def _reach(self) -> _StoreClient | None:
        """Return the client of the current store, or of the first one that answers."""
        if self._client is not None or self._closed or time.monotonic() - self._tried < RETRY_S:
            return self._client
        for address in self._addresses():
            client = _StoreClient(partial(_connect, address))
            try:
                client.connected.result(CONNECT_TIMEOUT_S)
            except (RuntimeError, TimeoutError):
                self._abandon(client)
                continue
            self._client, self._current = client, address
            self._notify()
            return self._client
        self._tried = time.monotonic()
        return None

    def _disconnect(self) -> None:
        self._abandon(self._client)
        self._client = None

    def _abandon(self, *clients: _StoreClient | None) -> None:
        candidates = (client for client in (*self._abandoned, *clients) if client is not None)
        self._abandoned = [client for client in candidates if not client.close()]

    def _notify(self) -> None:
        for callback in self.on_move:
            callback()


def host_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Host a store in this process; several users of one address share it.

    It listens on ``host`` alone if that is an address of this machine, else on all its addresses: others may know a
    name by another address than this machine does.

    Torch's store does a reverse look-up of every client's address before it answers anybody. Over IPv6, on which torch
    would listen, this host has no name without a name server, and if that does not answer either the store stalls for
    seconds. So we hand it a socket that listens on IPv4, unless the address is one of IPv6.
    """
    listening = None
    for interface in listening_addresses(host):
        # If the port is taken, then by this process itself; else torch reports the error.
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in interface else socket.AF_INET
            listening = socket.create_server((interface, port), family=family, backlog=2048)
            port = listening.getsockname()[1]
            break
    return dist.TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listening is None else listening.detach(),
    )


def listening_addresses(host: str) -> list[str]:
    """Return the addresses to listen on, the first that can be: ``host`` itself, if it is one, before all."""
    if host == "localhost":
        return ["127.0.0.1"]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ["0.0.0.0"]
    everywhere = "::" if address.version == 6 else "0.0.0.0"
    return [host] if address.is_loopback else [host, everywhere]


def _connect(address: Address) -> dist.TCPStore:
    """Connect to a store that may be dead; torch alone would retry, and log every refusal at length."""
    try:
        socket.create_connection(address, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise RuntimeError(f"no store at {address[0]}:{address[1]}: {error}") from None
    return dist.TCPStore(*address, None, False, timedelta(seconds=CONNECT_TIMEOUT_S), wait_for_workers=False)
