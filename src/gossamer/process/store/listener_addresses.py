"""Where the workers listen for each other's connections, as they publish it in the store."""

from __future__ import annotations

from gossamer.process.net.connection import Address
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.parsing import Refusals, read_address


class ListenerAddresses:
    def __init__(self, rank: int, own: Address, store: FailoverStore, refusals: Refusals) -> None:
        self._rank, self._own, self._store, self._refusals = rank, own, store, refusals
        self._known: dict[int, Address] = {rank: own}

    def publish(self) -> None:
        self._store.set(f"listener/{self._rank}", f"{self._own[0]} {self._own[1]}")

    def find(self, rank: int) -> Address | None:
        """Return the address of ``rank``: the one in the store, or the last one that was there."""
        key = f"listener/{rank}"
        published = self._store.get(key)
        address = self._refusals.checked(key, published, read_address(published))
        if address is not None:
            self._known[rank] = address
        return self._known.get(rank)
