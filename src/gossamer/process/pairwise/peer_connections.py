"""A worker's edges to its neighbours, built and rebuilt as they come and go.

For each missing edge the higher rank leaves a *connection request* in the store, under a name never used before. The
lower rank answers a new request with the name under which both build the edge. A worker that restarts, wakes up or
loses an edge only has to write a new request. A dead peer writes none, and costs one store lookup now and then.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

from gossamer.process.collectives.gloo import make_group
from gossamer.process.pairwise.edge import Edge
from gossamer.process.store.failover_store import FailoverStore

BUILD_S = 5.0
CLOSE_S = 2.0


class PeerConnections:
    """The edges of worker ``rank``."""

    def __init__(
        self,
        rank: int,
        neighbours: tuple[int, ...],
        store: FailoverStore,
        hear: Callable[[Edge, tuple[int, ...]], None],
    ) -> None:
        self.rank, self.neighbours, self.store, self.hear = rank, neighbours, store, hear
        self._lock = threading.Lock()
        self._edges: dict[int, Edge] = {}
        self._requests: dict[int, str] = {}
        self._answered: dict[int, str] = {}
        self._building: dict[int, threading.Thread] = {}
        self._closed = False
        self.lost = 0
        for peer in neighbours:
            self._request_connection(peer)
        store.moved.append(self._republish_requests)

    def edge(self, peer: int) -> Edge | None:
        """The edge to ``peer``, if it is open."""
        edge = self._edges.get(peer)
        return edge if edge is not None and edge.open else None

    def open(self) -> list[int]:
        """Neighbours that can be reached now."""
        return [peer for peer in self.neighbours if self.edge(peer) is not None]

    def poll(self) -> None:
        """Answer wishes, and build what was answered."""
        for peer in self.neighbours:
            if self._closed or self.edge(peer) is not None or peer in self._building:
                continue
            if self.rank < peer:
                request = self.store.get(f"request/{self.rank}-{peer}")
                if request is None or self._answered.get(peer) == request.decode():
                    continue
                self._answered[peer] = request.decode()
                name = f"{request.decode()}/{uuid.uuid4().hex}"
                if self.store.set(f"edge/{self.rank}-{peer}", name):
                    self._build(peer, name)
            else:
                found = self.store.get(f"edge/{peer}-{self.rank}")
                name = found.decode() if found is not None else ""
                if name.startswith(self._requests[peer] + "/") and self._answered.get(peer) != name:
                    self._answered[peer] = name
                    self._build(peer, name)

    def close(self) -> None:
        """Let go of all neighbours."""
        self._closed = True
        for edge in list(self._edges.values()):
            edge.close()
        with self._lock:
            under_way = list(self._building.values())
        for building in under_way:
            building.join(BUILD_S + CLOSE_S)

    def _request_connection(self, peer: int) -> None:
        if peer < self.rank:
            self._requests[peer] = uuid.uuid4().hex
            self.store.set(f"request/{peer}-{self.rank}", self._requests[peer])

    def _republish_requests(self) -> None:
        for peer, request in self._requests.items():
            if self.edge(peer) is None:
                self.store.set(f"request/{peer}-{self.rank}", request)

    def _build(self, peer: int, name: str) -> None:
        building = threading.Thread(target=self._built, args=(peer, name), name=f"gossamer-build-{peer}", daemon=True)
        with self._lock:
            # Whoever closes waits for what is listed: it has to be started by then.
            if not self._closed:
                self._building[peer] = building
                building.start()

    def _built(self, peer: int, name: str) -> None:
        side = int(self.rank > peer)
        try:
            store = self.store.store(BUILD_S, lambda: self._closed or self._over(peer, name))
            group = make_group(store, f"edge/{name}", side, 2, BUILD_S, beside=True)
        except RuntimeError:
            if not self._closed:
                self._request_connection(peer)
        else:
            with self._lock:
                edge = self._edges[peer] = Edge(peer, side, group, self.hear, self._gone, name)
            if self._closed:
                edge.close()
        finally:
            del self._building[peer]

    def _over(self, peer: int, name: str) -> bool:
        """Whether ``peer`` wishes anew: it does not come to build the edge of this name any more."""
        request = self.store.get(f"request/{self.rank}-{peer}") if self.rank < peer else None
        return request is not None and not name.startswith(request.decode() + "/")

    def _gone(self, edge: Edge) -> None:
        self.lost += 1
        if not self._closed:
            self._request_connection(edge.peer)
