"""A key-value store that fails over.

A run starts at one store, the home store. Every worker also serves a *spare* store on its listening port and publishes
its address. When the store in use dies or stops answering, workers move to the first spare that answers, in rank order,
and back to an earlier one as soon as that answers. They try several at once, those last that cannot be reached as far
as they know. Training needs nothing from the store: it serves those that come, or come back. So each worker simply
republishes its own entries after a move, and two workers that average together may use different stores.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from gossamer.process.net.connection import Address, Connection
from gossamer.process.net.first_answer import FirstAnswer
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.net.loop import Loop
from gossamer.process.store.home_store import Home, HomeStoreWait, Host, release_home
from gossamer.process.store.introduction import introduce
from gossamer.process.store.store_client import StoreClient
from gossamer.process.store.store_messages import PURPOSE
from gossamer.process.store.store_server import StoreServer

CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.5
CLOSE_CHECK_S = 0.5
"""How often a search for a store checks whether this worker closes."""

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
        self.unreachable: Callable[[], Collection[int]] = lambda: ()
        """The workers that this one cannot reach, as far as is known: their spares are tried last."""
        self.on_move: list[Callable[[], None]] = []
        """Called after a move to another store: every user republishes its entries."""
        self.listener: Listener | None = None
        """The listening port of this worker."""
        self._lock = threading.RLock()
        self._tried = 0.0
        self._num_attempts = 0
        self._moving = False
        self._closed = False
        self._reaching: threading.Event | None = None
        """Set when the search for a store that is in progress is over."""
        self._attempt: FirstAnswer | None = None
        self._home_host = ""
        """The host of the home store without a name: to look one up takes long without a network."""
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
            self._home_host = self._client.peer_address[0] if reached_at is None else _resolved(home.host)
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

    def compare_set(self, key: str, value: str, expected: str | bytes = "") -> bytes | None:
        """Set ``key`` if its value is ``expected`` (empty: if it has none). Return its value afterwards."""
        name = self.prefix + key
        return self._call(lambda client: client.compare_set(name, _to_bytes(expected), value.encode()))

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
            if self._attempt is not None:
                self._attempt.give_up()
        self.loop.close()
        if self._hosted is not None:
            release_home(self._hosted)
            self._hosted = None

    # Failing over

    def move_to_earlier(self) -> None:
        """Move to a store that precedes the current one if it answers. Never blocks: call it again and again."""
        with self._lock:
            if self._moving or self._closed or self._reaching is not None or self._current == self.home:
                return
            if time.monotonic() - self._tried < RETRY_S:
                return
            addresses, _ = self._addresses()
            earlier = addresses[: addresses.index(self._current) if self._current in addresses else None]
            self._tried = time.monotonic()
            self._num_attempts += 1
            self._moving = True
            address = earlier[self._num_attempts % len(earlier)]
        threading.Thread(target=self._try_to_move, args=(address,), name="gossamer-store-move", daemon=True).start()

    def _try_to_move(self, address: Address) -> None:
        try:
            client = StoreClient.connect(address, self.identity, self.loop, CONNECT_TIMEOUT_S)
        except OSError:
            return
        finally:
            self._moving = False
        with self._lock:
            if self._closed:
                client.close()
                return
            if self._client is not None:
                self._client.close()
            self._client, self._current = client, address
        self._notify()

    def _addresses(self) -> tuple[list[Address], list[Address]]:
        """Return the addresses of the home store and of the spares, and apart from them what cannot be reached."""
        unreachable = set(self.unreachable())
        spares = sorted(self.spares.copy().items())
        within_reach = [address for rank, address in spares if rank not in unreachable]
        return [self.home, *within_reach], [address for rank, address in spares if rank in unreachable]

    def _reach(self) -> StoreClient | None:
        """Return the client of the current store, or of the first one that answers."""
        with self._lock:
            if self._client is not None or self._closed or time.monotonic() - self._tried < RETRY_S:
                return self._client
            searching = self._reaching
            if searching is None:
                self._reaching = threading.Event()
        if searching is not None:
            # Another thread does: one search is enough.
            searching.wait()
            return self._client
        client = None
        try:
            found = self._search()
            client = None if found is None else self._use(*found)
        finally:
            if client is None:
                self._tried = time.monotonic()
            searching, self._reaching = self._reaching, None
            assert searching is not None
            searching.set()
        if client is not None:
            self._notify()
        return client

    def _search(self) -> tuple[Address, Connection] | None:
        """Return the first store that answers, and a connection to it."""
        within_reach, others = self._addresses()
        # The home store is where the network was at the start; nobody says whether it can be reached now.
        numeric = {(self._home_host or address[0], address[1]): address for address in within_reach[:1]}
        numeric |= {address: address for address in (*within_reach[1:], *others)}
        attempt = self._begin_attempt(list(numeric))
        while attempt is not None:
            try:
                found = attempt.result.result(CLOSE_CHECK_S)
            except TimeoutError:
                if self._closed:
                    return None
                continue
            return None if found is None else (numeric[found[0]], found[1])
        return None

    def _begin_attempt(self, addresses: list[Address]) -> FirstAnswer | None:
        with self._lock:
            if not self._closed:
                self._attempt = FirstAnswer(
                    self.loop, addresses, PURPOSE, identity=self.identity, timeout_s=CONNECT_TIMEOUT_S
                )
            return None if self._closed else self._attempt

    def _use(self, address: Address, connection: Connection) -> StoreClient | None:
        with self._lock:
            if self._closed or self._client is not None:
                # This worker has moved to an earlier store meanwhile.
                connection.close()
                return self._client
            try:
                self._client, self._current = StoreClient(connection, self.loop), address
            except OSError:
                # It has broken already.
                connection.close()
            return self._client

    def _disconnect(self, client: StoreClient) -> None:
        with self._lock:
            client.close()
            if self._client is client:
                self._client = None

    def _notify(self) -> None:
        for callback in self.on_move:
            callback()


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _resolved(host: str) -> str:
    """Return an address of ``host``; itself, if nobody knows one."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host
