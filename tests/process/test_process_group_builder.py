"""Members of a group tell each other through the store that they are ready, whichever store that is at the time."""

from __future__ import annotations

import time

from gossamer.process.collectives.group_builder import GroupBuilder
from gossamer.process.collectives.group_connections import GroupConnections
from gossamer.process.net.identity import Identity
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host, HostedStore

HOST = "127.0.0.1"


def test_a_worker_that_looks_no_more_is_seen_ready_in_the_next_store() -> None:
    """Worker 2 has seen all ready in a store that ends before worker 1 has looked there."""
    home = HostedStore(HOST, 0, Identity(0), print)
    port = home.address[1]
    stores = [FailoverStore(Home(HOST, port, Host.LAUNCHER, ""), Identity(rank), "test/", 20.0) for rank in (1, 2)]
    one, two = [
        GroupBuilder(rank, store, GroupConnections(rank, store.listen(HOST), lambda rank: None))
        for rank, store in zip((1, 2), stores, strict=True)
    ]
    until = time.monotonic() + 60

    def late(awaited: tuple[int, ...]) -> bool:
        return time.monotonic() > until

    assert stores[0].set("group/ready/1", "a call")
    assert two.await_ready("group", (1, 2), "a call", late) == {1: "a call", 2: "a call"}
    home.listener.close()
    again = HostedStore(HOST, port, Identity(0), print)
    for store in stores:
        while not store.set("moved", "1") and time.monotonic() < until:
            time.sleep(0.05)
    assert one.await_ready("group", (1, 2), "a call", late) == {1: "a call", 2: "a call"}
    for store in stores:
        store.close()
    again.listener.close()
