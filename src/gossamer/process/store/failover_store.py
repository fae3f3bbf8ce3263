"""Where workers find each other: a key-value store, and what takes its place when it is gone.

The run begins at one store (torchrun's, or rank 0's). Every worker also hosts a small one of its own and leaves its
address there. When the store dies or does not answer, survivors move to the first of those that does, in rank order,
and to an earlier one as soon as one answers. Nothing in a store is needed to go on training: it only helps to build new
connections, so everybody leaves its own entries anew after a move.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from gossamer.process.daemon_executor import DaemonExecutor

CONNECT_S = 1.0
OWN_S = 60.0
"""A store in this process will be there, however busy the machine is."""

ANSWER_S = 2.0
"""A store that has not answered for so long is taken for gone."""

CLOSE_S = 4.0
"""In so long a connection that is being made has been made, or has failed."""

RETRY_S = 0.5
LOOK_S = 0.3
"""How often whoever waits for an entry looks whether there is any hope."""

POLL_S = 0.005

Address = tuple[str, int]

T = TypeVar("T")


class _PollingStore(dist.Store):
    """The meeting point as the store that torch builds process groups with.

    A wait on a store's connection blocks everything else on it, and a connection for each group is too much: where many
    are opened at once some take seconds. This one asks again and again over the connection there is.
    """

    def __init__(self, store: FailoverStore, within_s: float, hopeless: Callable[[], bool]) -> None:
        super().__init__()
        self._store, self._within_s, self._hopeless = store, within_s, hopeless

    def set(self, key: str, value: Any) -> None:
        if not self._store.set(key, value):
            raise RuntimeError("the meeting point is out of reach")

    def get(self, key: str) -> bytes:
        looked = time.monotonic()
        until = looked + self._within_s
        while time.monotonic() < until:
            found = self._store.get(key)
            if found is not None:
                return found
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                if self._hopeless():
                    break
            time.sleep(POLL_S)
        raise RuntimeError(f"nobody came to {key}")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._store.get(key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        held = self._store.add(key, amount)
        if held is None:
            raise RuntimeError("the meeting point is out of reach")
        return held


class _StoreClient:
    """A connection to one store.

    A store whose process is stopped never answers, and torch waits for it without end; so a thread of its own asks, and
    is left behind when there is no answer in time.
    """

    def __init__(self, connect: Callable[[], dist.Store]) -> None:
        self._aside = DaemonExecutor("gossamer-store")
        self.connected = self._aside.submit(connect)

    def ask(self, question: Callable[[dist.Store], T]) -> T:
        """Raises RuntimeError if the store does not answer."""
        try:
            return self._aside.submit(lambda: question(self.connected.result())).result(ANSWER_S)
        except TimeoutError:
            raise RuntimeError(f"the store did not answer in {ANSWER_S} s") from None

    def close(self, within_s: float = 0.0) -> bool:
        """Whether its thread has ended."""
        return self._aside.close(within_s)


class FailoverStore:
    """One store at a time, out of several."""

    def __init__(self, host: str, port: int, hosting: bool, prefix: str, timeout_s: float) -> None:
        self.prefix = prefix
        self.home: Address = (host, port)
        self.spares: dict[int, Address] = {}
        """The workers' own stores, by rank."""
        self.moved: list[Callable[[], None]] = []
        """Called after a move: everybody leaves its entries anew."""
        self._lock = threading.RLock()
        self._at = self.home
        self._tried = 0.0
        self._closed = False
        within = timedelta(seconds=timeout_s)
        first = _host(self.home, "", within) if hosting else dist.TCPStore(host, port, None, False, within, False)
        self._hosted = [first] if hosting else []
        self._line: _StoreClient | None = _StoreClient(lambda: first)
        self._knock: tuple[Address, _StoreClient] | None = None
        self._knocks = 0
        self._given_up: list[_StoreClient] = []
        """Lines that have no use any more, and whose threads may not have ended."""

    def host_own(self, host: str) -> Address:
        """Start a store in this process; returns its address."""
        own = _host((host, 0), host, timedelta(seconds=OWN_S))
        self._hosted.append(own)
        return host, own.port

    @property
    def hosted_here(self) -> bool:
        """Whether the store in use is one of this process."""
        return any(own.port == self._at[1] for own in self._hosted)

    def store(self, within_s: float, hopeless: Callable[[], bool] = lambda: False) -> dist.Store:
        """A store for building a process group, whose members it waits for so long, or until that is ``hopeless``."""
        return _PollingStore(self, within_s, hopeless)

    def get(self, key: str) -> bytes | None:
        return self._ask(lambda store: store.get(self.prefix + key) if store.check([self.prefix + key]) else None)

    def set(self, key: str, value: Any) -> bool:
        """False if no store could be reached."""

        def put(store: dist.Store) -> bool:
            store.set(self.prefix + key, value)
            return True

        return bool(self._ask(put))

    def claim(self, key: str, value: str, instead_of: str = "") -> bytes | None:
        """Set ``key`` if it holds ``instead_of``, or nothing; returns what it holds then."""
        return self._ask(lambda store: store.compare_set(self.prefix + key, instead_of, value))

    def add(self, key: str, amount: int) -> int | None:
        """Add to a counter; returns what it holds then."""
        return self._ask(lambda store: store.add(self.prefix + key, amount))

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        """The store's answer; None if no store can be reached."""
        with self._lock:
            line = self._reach()
            if line is None:
                return None
            try:
                return line.ask(question)
            except RuntimeError:
                self._hang_up()
                return None

    def close(self) -> None:
        """Let go of the stores, our own included."""
        with self._lock:
            self._closed = True
            self._give_up(self._line, self._knock and self._knock[1])
            until = time.monotonic() + CLOSE_S
            for line in self._given_up:
                line.close(max(until - time.monotonic(), 0.0))
            self._line, self._knock, self._hosted = None, None, []

    def _addresses(self) -> list[Address]:
        return [self.home, *(address for _, address in sorted(self.spares.items()))]

    def listens(self, rank: int) -> bool:
        """False if nobody listens where the store of ``rank`` was: its process has ended."""
        try:
            socket.create_connection(self.spares[rank], CONNECT_S).close()
        except ConnectionRefusedError:
            return False
        except (OSError, KeyError):
            pass
        return True

    def answers(self, rank: int) -> bool:
        """Whether the store of ``rank`` answers: its process runs, and is not stopped."""
        address = self.spares.get(rank)
        if address is None:
            return False
        line = _StoreClient(partial(_connect, address))
        try:
            line.connected.result(CONNECT_S)
        except (RuntimeError, TimeoutError):
            return False
        finally:
            with self._lock:
                self._give_up(line)
        return True

    def seek_earlier(self) -> None:
        """Move to a store that comes before the present one, if it answers; never waits for that."""
        with self._lock:
            if self._knock is None:
                if self._at == self.home or self._closed or time.monotonic() - self._tried < RETRY_S:
                    return
                addresses = self._addresses()
                earlier = addresses[: addresses.index(self._at) if self._at in addresses else None]
                self._tried = time.monotonic()
                self._knocks += 1
                address = earlier[self._knocks % len(earlier)]
                self._knock = address, _StoreClient(partial(_connect, address))
            address, line = self._knock
            if not line.connected.done():
                return
            self._knock = None
            if line.connected.exception() is not None:
                self._give_up(line)
                return
            self._hang_up()
            self._line, self._at = line, address
        self._tell()

    def _reach(self) -> _StoreClient | None:
        """The line to the present store, or to the next that answers."""
        if self._line is not None or self._closed or time.monotonic() - self._tried < RETRY_S:
            return self._line
        for address in self._addresses():
            line = _StoreClient(partial(_connect, address))
            try:
                line.connected.result(CONNECT_S)
            except (RuntimeError, TimeoutError):
                self._give_up(line)
                continue
            self._line, self._at = line, address
            self._tell()
            return self._line
        self._tried = time.monotonic()
        return None

    def _hang_up(self) -> None:
        self._give_up(self._line)
        self._line = None

    def _give_up(self, *lines: _StoreClient | None) -> None:
        self._given_up = [line for line in (*self._given_up, *lines) if line is not None and not line.close()]

    def _tell(self) -> None:
        for call in self.moved:
            call()


def _host(address: Address, interface: str, within: timedelta) -> dist.TCPStore:
    """A store in this process, which several who meet at the same address share.

    Torch's store looks up the name of everybody who connects, and answers nobody until it has it. Over IPv6, which it
    would listen on, this host itself has no name without a name server, and where that does not answer either a store
    stands still for seconds. So it is handed a socket that listens on IPv4, if the address is one.
    """
    host, port = address
    listening = None
    with contextlib.suppress(OSError):
        # Where the port is taken already it is by ourselves, or torch says by whom.
        socket.getaddrinfo(host, port, socket.AF_INET)
        listening = socket.create_server((interface or "0.0.0.0", port), backlog=2048)
        port = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        None,
        True,
        within,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _connect(address: Address) -> dist.Store:
    """Connect to a store that may not be there; torch would retry, and report every refusal at length."""
    try:
        socket.create_connection(address, CONNECT_S).close()
    except OSError as error:
        raise RuntimeError(f"no store at {address[0]}:{address[1]}: {error}") from None
    return dist.TCPStore(*address, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False)
