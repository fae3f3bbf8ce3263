"""The store at which a run starts: where it is, who hosts it, and how a worker waits for it.

Rank 0 hosts it at MASTER_ADDR:MASTER_PORT, unless a launcher of ours does. Under torchrun, or in a process group of the
user's, torch's own store has that port. It then serves for one thing: rank 0 publishes there where the home store is.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from gossamer.errors import InputError
from gossamer.process.daemon_executor import DaemonExecutor
from gossamer.process.net.connection import Address, connect
from gossamer.process.net.greeting import Reason, Refused
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.net.loop import Loop
from gossamer.process.store.addresses import listening_addresses, local_address
from gossamer.process.store.introduction import introduce
from gossamer.process.store.parsing import read_address
from gossamer.process.store.store_client import StoreClient
from gossamer.process.store.store_messages import PURPOSE
from gossamer.process.store.store_server import StoreServer

T = TypeVar("T")

RETRY_S = 0.2
CONNECT_TIMEOUT_S = 5.0
"""How long one attempt to connect to the store may take."""

RESOLVE_LIMIT_S = 40.0
"""How long a name that does not resolve is tried: longer than the name server of a cluster remembers that it does not
know a name (30 s), and much shorter than machines may take to start."""

ANSWER_TIMEOUT_S = 30.0
"""How long what accepts connections may take to answer as a store does."""

TLS_TIMEOUT_S = 3.0
"""How long a TLS handshake may fail again and again."""

SAY_AFTER_S = 5.0
"""A wait that lasts longer than this is said."""


class Host(Enum):
    """Who hosts the home store."""

    RANK_0 = "rank 0, at the address that all know"
    RANK_0_ANYWHERE = "rank 0, at an address that it publishes in torch's store"
    LAUNCHER = "the launcher of the workers"


class Home(NamedTuple):
    """What a worker knows of the home store before it has found it."""

    host: str
    port: int
    hosted_by: Host
    key: str
    """Under which the address is published in torch's store."""


class HostedStore:
    """A store at one address of this process."""

    def __init__(self, host: str, port: int, identity: Identity, on_refused: Callable[[str], None]) -> None:
        """OSError if nothing can listen there."""
        for interface in listening_addresses(host):
            try:
                self.listener = Listener(interface, port, identity=identity, on_refused=on_refused)
                break
            except OSError as error:
                failed = error
        else:
            raise failed
        self.server = StoreServer(self.listener)
        introduce(self.listener, lambda: None)
        self.address: Address = (host, self.listener.address[1])
        self.users = 0


_hosted: dict[tuple[str, int, str], HostedStore] = {}
"""The home stores of this process. A process may join several times, also at once, at one address."""

_hosted_lock = threading.Lock()


def host_home(home: Home, identity: Identity, on_refused: Callable[[str], None] = lambda text: None) -> HostedStore:
    """Host the home store in this process, or take part in hosting it; OSError if nothing can listen there."""
    anywhere = home.hosted_by == Host.RANK_0_ANYWHERE
    with _hosted_lock:
        name = (home.host, home.port, home.key)
        if name not in _hosted:
            host, port = (local_address(home.host), 0) if anywhere else (home.host, home.port)
            _hosted[name] = HostedStore(host, port, identity, on_refused)
            # An address that was published once stays: others may read it late.
            _hosted[name].users = int(anywhere)
        _hosted[name].users += 1
        return _hosted[name]


def release_home(store: HostedStore) -> None:
    """Take part no more; the last one closes the store."""
    with _hosted_lock:
        store.users -= 1
        if store.users == 0:
            for name in [name for name, other in _hosted.items() if other is store]:
                del _hosted[name]
            store.listener.close()


class HomeStoreWait:
    """The wait for the home store, at most ``timeout_s``. ``on_wait(text)`` is told what it is for."""

    def __init__(self, home: Home, identity: Identity, timeout_s: float, on_wait: Callable[[str], None]) -> None:
        self.home, self.identity, self.timeout_s, self._on_wait = home, identity, timeout_s, on_wait
        self.address: Address = (home.host, home.port)
        """Of the home store; that of torch's store until the other is found there."""
        self._began = time.monotonic()
        self._said = False

    def until_resolved(self) -> None:
        """Wait until the host has an address. A cluster's name server may learn it late; a typing error it never."""
        host, port = self.address
        limit_s = min(self.timeout_s, RESOLVE_LIMIT_S)
        while True:
            try:
                socket.getaddrinfo(host, port)
                self._said = False
                return
            except OSError as error:
                cause = f"MASTER_ADDR {host!r} does not resolve ({error.strerror or error})"
                self._say(f"{cause}: trying for {limit_s:.0f} s")
                self._check_time(f"{cause}: set it to the name or address of the machine of worker 0", limit_s)
            time.sleep(RETRY_S)

    def until_hosted(self, on_refused: Callable[[str], None]) -> HostedStore:
        """Host the home store in this process."""
        host, port = self.address
        try:
            store = host_home(self.home, self.identity, on_refused)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and self._who_is_there() == self.identity.rank:
                raise InputError(
                    f"worker {self.identity.rank} of this run is alive already, at {host}:{port}: give each process a "
                    "rank of its own, or end that one first"
                ) from None
            raise InputError(
                f"worker 0 cannot host the store at {host}:{port} ({error.strerror or error}): "
                "set MASTER_PORT to a port that nothing else uses"
            ) from None
        if self.home.hosted_by == Host.RANK_0_ANYWHERE:
            text = "{} {}".format(*store.address)
            self._with_torch_store(lambda torch_store: torch_store.set(self.home.key, text))
        self.address = store.address
        return store

    def until_found(self) -> None:
        """Find the address of the home store in torch's store, if it is there."""
        if self.home.hosted_by != Host.RANK_0_ANYWHERE:
            return

        def find(store: dist.Store) -> Address:
            while True:
                published = store.get(self.home.key) if store.check([self.home.key]) else None
                address = read_address(published)
                if address is not None:
                    return address
                self._wait("worker 0 has not said where it is")
                time.sleep(RETRY_S)

        self.address = self._with_torch_store(find)

    def until_connected(self, loop: Loop, hosted: HostedStore | None) -> StoreClient:
        """Return a client of the store, once there is one; ``hosted``: the store, if this process hosts it."""
        host, port = self.address
        silent_since: float | None = None
        while True:
            began = time.monotonic()
            try:
                client = StoreClient.connect(
                    self.address, self.identity, loop, min(CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S)
                )
                if hosted is None or client.peer_incarnation == hosted.listener.identity.incarnation:
                    return client
                client.close()
                raise InputError(_elsewhere(self.address))
            except (Refused, TimeoutError) as error:
                since_s = 0.0 if silent_since is None else time.monotonic() - silent_since
                # A process that is being killed looks like one without the right certificate.
                patient = {Reason.CUT_OFF: True, Reason.TLS: since_s < TLS_TIMEOUT_S}
                if isinstance(error, Refused) and not patient.get(error.reason, False):
                    raise InputError(
                        f"the store at {host}:{port} refused the connection: {_ours(error.reason)}"
                    ) from None
                silent_since, cause = silent_since or began, "no answer: another program, or one with TLS"
            except OSError as error:
                silent_since, cause = None, error.strerror or str(error)
            if silent_since is not None and time.monotonic() - silent_since > ANSWER_TIMEOUT_S:
                if hosted is not None:
                    raise InputError(_elsewhere(self.address)) from None
                raise InputError(
                    f"what listens at {host}:{port} does not answer as gossamer's store does: "
                    "set MASTER_PORT to a port that nothing else uses"
                ) from None
            self._wait(cause)
            time.sleep(RETRY_S)

    def _wait(self, cause: str) -> None:
        host, port = self.address
        if time.monotonic() - self._began > SAY_AFTER_S:
            self._say(f"waiting for the store of worker 0 at {host}:{port} ({cause})")
        self._check_time(
            f"there is no store at {host}:{port} after {self.timeout_s:.0f} s ({cause}): "
            "start worker 0, and give all workers its MASTER_ADDR and MASTER_PORT"
        )

    def _who_is_there(self) -> int | None:
        try:
            there = connect(self.address, PURPOSE, b"", identity=self.identity, timeout_s=CONNECT_TIMEOUT_S)
        except OSError:
            return None
        there.close()
        return there.peer_rank

    def _with_torch_store(self, use: Callable[[dist.Store], T]) -> T:
        """Return ``use(store)`` of torch's store. It runs in a thread that is abandoned if torch waits without end."""
        executor = DaemonExecutor("gossamer-torch-store")
        try:
            store = executor.submit(self._torch_store).result(self.timeout_s + ANSWER_TIMEOUT_S)
            return executor.submit(lambda: use(store)).result(self.timeout_s + ANSWER_TIMEOUT_S)
        except TimeoutError:
            host, port = self.address
            raise InputError(
                f"what listens at {host}:{port} does not answer as PyTorch's store does: "
                "set MASTER_PORT to a port that nothing else uses"
            ) from None
        except RuntimeError as error:
            raise InputError(f"PyTorch's store at {self.address[0]}:{self.address[1]}: {_first_line(error)}") from None
        finally:
            executor.close()

    def _torch_store(self) -> dist.Store:
        if dist.is_initialized():
            store: dist.Store = dist.distributed_c10d._get_default_store()
            return store
        while True:
            try:
                socket.create_connection(self.address, CONNECT_TIMEOUT_S).close()
                return dist.TCPStore(*self.address, None, False, timedelta(seconds=self.timeout_s), False)
            except OSError as error:
                self._wait(error.strerror or str(error))
            time.sleep(RETRY_S)

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            self._on_wait(text)

    def _check_time(self, text: str, limit_s: float | None = None) -> None:
        if time.monotonic() - self._began > (self.timeout_s if limit_s is None else limit_s):
            raise InputError(text)


def _elsewhere(address: Address) -> str:
    return (
        f"worker 0 cannot reach its own store at {address[0]}:{address[1]}: "
        "MASTER_ADDR has to be the machine of worker 0"
    )


def _ours(reason: Reason) -> str:
    """Return a reason of the other end as one of ours."""
    return str(reason).replace("it ", "this worker ", 1) if reason == Reason.WRONG_PROOF else str(reason)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
