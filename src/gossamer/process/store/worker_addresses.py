"""Where the workers listen, for connections of each other and as spare stores: as they say, or publish in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gossamer.process.net.connection import Address
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.parsing import Refusals, read_address


class WorkerAddresses:
    def __init__(self, rank: int, own: Address, store: FailoverStore, refusals: Refusals) -> None:
        self._rank, self._own, self._store, self.refusals = rank, own, store, refusals
        self.on_found: Callable[[int, Address], None] = lambda rank, address: None
        """Called, in any thread, when a worker is at another address than before."""

    def publish(self) -> None:
        # This worker's own spare store is one of those that it may move to.
        self._store.spares[self._rank] = self._own
        self._store.set(f"address/{self._rank}", "{} {}".format(*self._own))

    def known(self, rank: int) -> Address | None:
        """Return where ``rank`` listens, as far as this worker knows; waits for nobody."""
        return self._store.spares.get(rank)

    def find(self, rank: int) -> Address | None:
        """Return where ``rank`` listens: what it has published last, as far as this worker knows."""
        key = f"address/{rank}"
        published = self._store.get(key)
        address = self.refusals.checked(key, published, read_address(published))
        if address is not None:
            self.note(rank, address)
        return self._store.spares.get(rank)

    def read(self, ranks: Sequence[int], besides: Sequence[str]) -> list[tuple[Address | None, bytes | None]]:
        """Return what each of ``ranks`` has published: its address, and the entry of the same place in ``besides``."""
        keys = [f"address/{rank}" for rank in ranks]
        values = self._store.get_all([*keys, *besides])
        addresses = [
            self.refusals.checked(key, value, read_address(value))
            for key, value in zip(keys, values[: len(keys)], strict=True)
        ]
        return list(zip(addresses, values[len(keys) :], strict=True))

    def note(self, rank: int, address: Address) -> None:
        """``rank`` listens at this address."""
        if self._store.spares.get(rank) != address:
            self._store.spares[rank] = address
            self.on_found(rank, address)
