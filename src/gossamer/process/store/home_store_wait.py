"""How a worker waits for the store at which a run starts: with an end, and it says what it waits for."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Protocol, TypeVar

import torch.distributed as dist

from gossamer.errors import InputError

RETRY_S = 0.2
CONNECT_TIMEOUT_S = 1.0
"""How long one attempt to reach the store's port may take."""

ANSWER_TIMEOUT_S = 30.0
"""How long a store that accepts connections may take to answer the first request."""

SAY_AFTER_S = 5.0
"""A wait that lasts longer than this is said."""

Address = tuple[str, int]


class Client(Protocol):
    """A connection to a store, in the making."""

    connected: Future[dist.TCPStore]

    def close(self) -> bool:
        """Give up the connection."""


C = TypeVar("C", bound=Client)


class HomeStoreWait:
    """The wait for the store at ``address``, at most ``timeout_s``. ``on_wait(text)`` is told what it is for."""

    def __init__(self, address: Address, timeout_s: float, on_wait: Callable[[str], None]) -> None:
        self.address, self.timeout_s, self._on_wait = address, timeout_s, on_wait
        self._began = time.monotonic()
        self._said = False

    def until_resolved(self) -> None:
        """Wait until the host has an address. A cluster's name server may learn it late; a typing error it never."""
        host, port = self.address
        while True:
            try:
                socket.getaddrinfo(host, port)
                self._said = False
                return
            except OSError as error:
                cause = f"MASTER_ADDR {host!r} does not resolve ({error.strerror or error})"
                self._say(f"{cause}: trying for {self.timeout_s:.0f} s")
                self._check_time(f"{cause}: set it to the name or address of the machine of worker 0")
            time.sleep(RETRY_S)

    def until_connected(self, make_client: Callable[[Callable[[], dist.TCPStore]], C]) -> C:
        """Return a client of the store, once there is one."""
        host, port = self.address
        while True:
            cause = self._refusal()
            if cause is None:
                client = make_client(
                    lambda: dist.TCPStore(host, port, None, False, timedelta(seconds=self.timeout_s), False)
                )
                try:
                    client.connected.result(ANSWER_TIMEOUT_S)
                    return client
                except TimeoutError:
                    client.close()
                    raise InputError(
                        f"what listens at {host}:{port} does not answer as PyTorch's store does: "
                        "set MASTER_PORT to a port that nothing else uses"
                    ) from None
                except RuntimeError as error:
                    client.close()
                    cause = _first_line(error)
            if time.monotonic() - self._began > SAY_AFTER_S:
                self._say(f"waiting for the store of worker 0 at {host}:{port} ({cause})")
            self._check_time(
                f"there is no store at {host}:{port} after {self.timeout_s:.0f} s ({cause}): "
                "start worker 0, and give all workers its MASTER_ADDR and MASTER_PORT"
            )
            time.sleep(RETRY_S)

    def hosted(self, store: Future[dist.TCPStore]) -> dist.TCPStore:
        """Return the store that this process hosts, once it runs."""
        host, port = self.address
        try:
            return store.result(min(self.timeout_s, ANSWER_TIMEOUT_S))
        except TimeoutError:
            raise InputError(
                f"worker 0 cannot reach its own store at {host}:{port}: MASTER_ADDR has to be the machine of worker 0"
            ) from None
        except RuntimeError as error:
            raise InputError(
                f"worker 0 cannot host the store at {host}:{port} ({_first_line(error)}): "
                "set MASTER_PORT to a port that nothing else uses"
            ) from None

    def _refusal(self) -> str | None:
        """Return why nothing accepts connections at the address; None if something does."""
        try:
            socket.create_connection(self.address, CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            self._on_wait(text)

    def _check_time(self, text: str) -> None:
        if time.monotonic() - self._began > self.timeout_s:
            raise InputError(text)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
