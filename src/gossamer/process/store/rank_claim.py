"""One live process per rank: a second one is refused, one in the place of a dead one is let in."""

from __future__ import annotations

import re
import socket
from typing import NamedTuple

from gossamer.errors import InputError
from gossamer.process.net.connection import Address, connect
from gossamer.process.store.failover_store import CONNECT_TIMEOUT_S, FailoverStore
from gossamer.process.store.parsing import read_address
from gossamer.process.store.store_messages import PURPOSE

ALIVE_TIMEOUT_S = 3.0
"""A process that does not greet within this time is stopped, or its machine is."""

MAX_ATTEMPTS = 8
"""Others may claim the same rank at the same time."""


class Claim(NamedTuple):
    """What a process publishes about itself."""

    address: Address
    incarnation: str

    def to_text(self) -> str:
        return f"{self.address[0]} {self.address[1]} {self.incarnation}"


def read_claim(value: bytes | None) -> Claim | None:
    """Return a claim; None if there is none that can be read."""
    text, _, incarnation = (value or b"").rpartition(b" ")
    address = read_address(text)
    if address is None or not re.fullmatch(rb"[0-9a-f]{32}", incarnation):
        return None
    return Claim(address, incarnation.decode())


class RankClaim:
    """The claim of one process to its rank."""

    def __init__(self, store: FailoverStore, address: Address) -> None:
        """``address``: where this process listens."""
        assert store.identity.rank is not None
        self._store, self._rank = store, store.identity.rank
        self._claim = Claim(address, store.identity.incarnation.hex())
        self._key = f"claim/{self._rank}"

    def make(self) -> None:
        """Claim the rank. InputError if a process of this rank is alive."""
        other = self._claim_rank()
        if other:
            raise InputError(
                f"rank {self._rank} is taken: the process of this rank at {other}: "
                "give each process a rank of its own, or end that one first"
            )

    def republish(self) -> None:
        """Publish the claim in a store that may be new. InputError if another process has claimed the rank there."""
        other = self._claim_rank()
        if other:
            raise InputError(
                f"rank {self._rank} was given to two processes while the network was cut, and the one at {other}: "
                "this one ends; start it again as a new worker, and it is given another rank"
            )

    def _claim_rank(self) -> str:
        """Publish the claim, unless another live process has claimed the rank; return where that is, and its state."""
        expected = ""
        for _ in range(MAX_ATTEMPTS):
            stored = self._store.compare_set(self._key, self._claim.to_text(), expected)
            if stored is None or stored == self._claim.to_text().encode():
                return ""
            earlier = read_claim(stored)
            alive = "" if earlier is None else self._find(earlier)
            if alive:
                return alive
            expected = stored.decode(errors="replace")
        self._store.set(self._key, self._claim.to_text())
        return ""

    def _find(self, earlier: Claim) -> str:
        """Return where the process is that made an earlier claim, and its state; empty if it cannot be reached."""
        host, port = earlier.address
        try:
            # The kernel of a stopped process accepts connections for it; that of a lost machine does not.
            socket.create_connection(earlier.address, CONNECT_TIMEOUT_S).close()
        except OSError:
            return ""
        try:
            there = connect(earlier.address, PURPOSE, b"", identity=self._store.identity, timeout_s=ALIVE_TIMEOUT_S)
        except TimeoutError:
            return f"{host}:{port} is there, but does not answer"
        except OSError:
            return ""
        there.close()
        if (there.peer_rank, there.peer_incarnation.hex()) != (self._rank, earlier.incarnation):
            return ""
        return f"{host}:{port} is alive"
