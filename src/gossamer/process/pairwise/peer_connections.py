"""The edges of a worker to its neighbours, built and rebuilt as they come and go, all by the loop of the listener.

The higher rank connects to the lower one, at once and then again and again with growing pauses. The lower rank may know
more: that the edge broke, or that it is a new process at another address. So it asks for a connection in the same way:
it connects, says where it listens and which edge it has lost, and hangs up.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gossamer.process.net.connection import Address, Connection
from gossamer.process.net.dialing import Dialing
from gossamer.process.net.listener import Listener
from gossamer.process.pairwise.edge import Edge, EdgeEvents
from gossamer.process.store.parsing import read_address

EDGE, REQUEST = "edge", "edge request"
"""The purposes of connections: to be an edge, to ask for one."""

CONNECT_TIMEOUT_S = 2.0
FIRST_REQUEST_S = 0.1
"""How long the lower rank waits for the higher one before it asks: usually that connects by itself."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 1.0
CLOSE_TIMEOUT_S = 2.0
FORMER_S = 1.0
"""How long the edge to a former neighbour stays: what was sent over it last is read meanwhile."""

NAME_BYTES = 32


@dataclass
class _Peer:
    """What this worker knows of one neighbour."""

    rank: int
    address: Address | None = None
    edge: Edge | None = None
    pause_s: float = MIN_PAUSE_S
    dialing: Dialing | None = None
    waiting: bool = False
    """A timer will try the next time."""
    incarnation: bytes = b""
    """Of the process that the counts are about."""
    num_committed: int = 0
    """Exchanges that this process has committed with that one."""
    said: tuple[Edge, int] | None = None
    """The newest edge whose first frame has come, and how many exchanges the peer had committed."""
    gone: bytes = b""
    """An incarnation that has ended: nobody listens at its address any more."""


class PeerConnections:
    def __init__(
        self,
        rank: int,
        neighbours: tuple[int, ...],
        listener: Listener,
        on_message: Callable[[Edge, tuple[int, ...]], None],
        counts_as_lost: Callable[[], bool] = lambda: True,
    ) -> None:
        """``counts_as_lost()``: whether an edge that breaks now is a loss, not the end of training."""
        self.rank, self.neighbours = rank, neighbours
        self._counts_as_lost, self._listener, self._loop = counts_as_lost, listener, listener.loop
        self._peers = {peer: _Peer(peer) for peer in neighbours}
        self._changed = threading.Condition()
        """Guards counts and what peers said about theirs."""
        self._closed = False
        self.num_lost = 0
        """Edges that broke, without those that were closed at the end."""
        self._events = EdgeEvents(on_message, self._on_committed, self._lost, self._commit, self._settle)
        self._former_since: dict[int, float] = {}
        """Since when these workers are no neighbours any more, though there is an edge to them."""
        self._register()

    def _register(self) -> None:
        if self.neighbours:
            self._listener.register(EDGE, self._accept)
            self._listener.register(REQUEST, self._requested)

    # From any thread

    def set_neighbours(self, addresses: Mapping[int, Address | None]) -> None:
        """From now on these are the neighbours; where they listen, if that is known."""

        def change() -> None:
            now = time.monotonic()
            self._former_since |= {rank: now for rank in self.neighbours if rank not in addresses}
            for rank in addresses:
                self._former_since.pop(rank, None)
                self._peers.setdefault(rank, _Peer(rank))
            self.neighbours = tuple(addresses)
            self._register()
            for rank, address in addresses.items():
                if address is not None and self.edge(rank) is None:
                    self._moved(self._peers[rank], address)

        self._loop.call_soon(change)

    def drop_former(self) -> None:
        """Close the edges to former neighbours. Only while this worker is in no exchange, nor about to be."""
        now = time.monotonic()
        for rank in [rank for rank, since in list(self._former_since.items()) if now - since > FORMER_S]:
            self._former_since.pop(rank, None)
            edge = self.edge(rank)
            if edge is not None and rank not in self.neighbours:
                edge.drop()

    def set_address(self, peer: int, address: Address) -> None:
        """Note where a neighbour listens."""
        if peer in self._peers and self._peers[peer].address != address:
            self._loop.call_soon(lambda: self._moved(self._peers[peer], address))

    def edge(self, peer: int) -> Edge | None:
        """Return the edge to ``peer`` if it is open."""
        known = self._peers.get(peer)
        edge = None if known is None else known.edge
        return edge if edge is not None and edge.open else None

    def connected(self) -> list[int]:
        """Return the neighbours that can be reached now."""
        return [peer for peer in self.neighbours if self.edge(peer) is not None]

    def close(self) -> None:
        """Close all edges; no message is delivered after this returns."""
        # The purposes stay registered: a peer that tries to connect now is no stranger to be warned of.
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        done = threading.Event()

        def close_all() -> None:
            for peer in self._peers.values():
                if peer.dialing is not None:
                    peer.dialing.cancel()
                if peer.edge is not None:
                    peer.edge.drop()
            self._loop.call_soon(done.set)

        self._loop.call_soon(close_all)
        done.wait(CLOSE_TIMEOUT_S)

    # In the thread of the loop

    def _moved(self, peer: _Peer, address: Address) -> None:
        peer.address, peer.pause_s = address, MIN_PAUSE_S
        self._seek(peer, MIN_PAUSE_S if peer.rank < self.rank else FIRST_REQUEST_S)

    def _seek(self, peer: _Peer, pause_s: float) -> None:
        """Connect to a peer, or ask it to connect, after a pause."""
        if peer.rank not in self.neighbours:
            return
        if not peer.waiting and peer.dialing is None and not self._closed:
            peer.waiting = True
            self._loop.call_later(pause_s * random.uniform(0.5, 1.0), lambda: self._dial(peer))

    def _dial(self, peer: _Peer) -> None:
        peer.waiting = False
        if self._closed or peer.address is None or self.edge(peer.rank) is not None:
            return
        if peer.rank not in self.neighbours:
            return
        connects, name, address = peer.rank < self.rank, uuid.uuid4().hex, peer.address
        last = peer.edge.name if peer.edge is not None else ""
        request = " ".join([last, *map(str, self._listener.address)])

        def failed(error: OSError) -> None:
            peer.dialing = None
            if isinstance(error, ConnectionRefusedError) and peer.address == address:
                with self._changed:
                    peer.gone = peer.incarnation
                    self._changed.notify_all()
            peer.pause_s = min(2 * peer.pause_s, MAX_PAUSE_S)
            self._seek(peer, peer.pause_s)

        def ready(connection: Connection) -> None:
            peer.dialing = None
            if connection.peer_rank != peer.rank:
                # Another worker listens there by now.
                connection.close()
                failed(ConnectionError())
            elif connects:
                self._add(peer, connection, name)
            else:
                connection.close()
                failed(ConnectionError())

        peer.dialing = Dialing(
            self._loop,
            address,
            EDGE if connects else REQUEST,
            (name if connects else request).encode(),
            identity=self._listener.identity,
            timeout_s=CONNECT_TIMEOUT_S,
            on_ready=ready,
            on_failed=failed,
        )

    def _accept(self, connection: Connection, hello: bytes) -> None:
        """A neighbour of higher rank has connected."""
        rank, name = connection.peer_rank, hello.decode("ascii", errors="replace")
        if self._closed or rank not in self.neighbours or rank <= self.rank or len(name) != NAME_BYTES:
            connection.close()
            return
        self._add(self._peers[rank], connection, name)

    def _requested(self, connection: Connection, hello: bytes) -> None:
        """A neighbour of lower rank asks for a connection."""
        rank, incarnation = connection.peer_rank, connection.peer_incarnation
        connection.close()
        lost, _, listens = hello.decode("ascii", errors="replace").partition(" ")
        address = read_address(listens.encode())
        if self._closed or rank not in self.neighbours or rank >= self.rank or address is None:
            return
        peer = self._peers[rank]
        if peer.edge is not None and (peer.edge.name == lost or peer.incarnation != incarnation):
            peer.edge.drop()
        if peer.address != address:
            peer.address = address
            if peer.dialing is not None:
                peer.dialing.cancel()
                peer.dialing = None
        peer.pause_s = MIN_PAUSE_S
        self._seek(peer, 0.0)

    def _add(self, peer: _Peer, connection: Connection, name: str) -> None:
        if peer.edge is not None:
            # From now on nothing is committed over it.
            peer.edge.drop()
        with self._changed:
            if peer.incarnation != connection.peer_incarnation:
                peer.incarnation, peer.num_committed, peer.said = connection.peer_incarnation, 0, None
                self._changed.notify_all()
            committed = peer.num_committed
        decides = self.rank < peer.rank
        peer.edge = Edge(peer.rank, decides, connection, self._loop, self._events, name, committed)

    # Edges, in any thread

    def _lost(self, edge: Edge) -> None:
        if self._closed:
            return
        peer = self._peers[edge.peer]
        heard = peer.said is not None and peer.said[0] is edge
        if peer.rank in self.neighbours:
            # Closed without a word: the other end does not know yet that the two are neighbours.
            self.num_lost += int(heard and self._counts_as_lost())
            pause_s = 0.0 if peer.rank < self.rank else FIRST_REQUEST_S
            if not heard:
                peer.pause_s = pause_s = min(2 * peer.pause_s, MAX_PAUSE_S)
            self._loop.call_soon(lambda: self._seek(peer, pause_s))

    def _commit(self, edge: Edge) -> None:
        with self._changed:
            self._peers[edge.peer].num_committed += 1

    def _on_committed(self, edge: Edge, count: int) -> None:
        with self._changed:
            self._peers[edge.peer].said = edge, count
            self._peers[edge.peer].pause_s = MIN_PAUSE_S
            self._changed.notify_all()

    def _settle(self, edge: Edge, until: float) -> bool:
        """Return whether the peer has committed the exchange in which ``edge`` broke.

        The next edge tells. Until then that peer makes no other exchange with this worker, which is still in this one.
        """
        peer, incarnation = self._peers[edge.peer], edge.connection.peer_incarnation
        with self._changed:
            while True:
                if peer.incarnation != incarnation or peer.gone == incarnation or self._closed:
                    return False
                if peer.said is not None and peer.said[0] is not edge:
                    settled = peer.said[1] > peer.num_committed
                    peer.num_committed += int(settled)
                    return settled
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
