"""Where the workers listen, as they publish it in the store: for connections of each other, and as spare stores."""

from __future__ import annotations

from gossamer.process.net.connection import Address
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.parsing import Refusals, read_address


class WorkerAddresses:
    def __init__(self, rank: int, own: Address, store: FailoverStore, refusals: Refusals) -> None:
        self._rank, self._own, self._store, self._refusals = rank, own, store, refusals

    def publish(self) -> None:
        self._store.set(f"address/{self._rank}", "{} {}".format(*self._own))

    def find(self, rank: int) -> Address | None:
        """Return where ``rank`` listens: what it has published last, as far as this worker knows."""
        key = f"address/{rank}"
        published = self._store.get(key)
        address = self._refusals.checked(key, published, read_address(published))
        if address is not None:
            self._store.spares[rank] = address
        return self._store.spares.get(rank)
