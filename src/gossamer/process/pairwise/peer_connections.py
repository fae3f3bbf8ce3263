"""The edges of a worker to its neighbours, built and rebuilt as they come and go.

For each missing edge the higher rank publishes a *connection request* under a name never used before. The lower rank
answers a new request with the name under which both build the edge. A worker that restarts, wakes up or loses an edge
only has to publish a new request. A dead peer publishes none, and costs one store request now and then.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

from gossamer.process.collectives.group_builder import BUILD_TIMEOUT_S, GroupBuilder
from gossamer.process.pairwise.edge import Edge

CLOSE_TIMEOUT_S = 2.0
MAX_NAME_BYTES = 128
"""Of a request, or of the edge that answers it: two identifiers of 32 letters."""


class PeerConnections:
    def __init__(
        self,
        neighbours: tuple[int, ...],
        builder: GroupBuilder,
        on_message: Callable[[Edge, tuple[int, ...]], None],
        counts_as_lost: Callable[[], bool] = lambda: True,
    ) -> None:
        """``counts_as_lost()``: whether an edge that breaks now is a loss, not the end of training."""
        self._counts_as_lost = counts_as_lost
        self.rank, self.neighbours, self.on_message = builder.rank, neighbours, on_message
        self.builder, self.store = builder, builder.store
        self._lock = threading.Lock()
        self._polling = threading.Lock()
        self._edges: dict[int, Edge] = {}
        self._requests: dict[int, str] = {}
        self._answered: dict[int, str] = {}
        self._builders: dict[int, threading.Thread] = {}
        self._closed = False
        self.num_lost = 0
        """Edges that broke, without those that were closed at the end."""
        for peer in neighbours:
            self._request(peer)
        self.store.on_move.append(self._republish)

    def edge(self, peer: int) -> Edge | None:
        """Return the edge to ``peer`` if it is open."""
        edge = self._edges.get(peer)
        return edge if edge is not None and edge.open else None

    def connected(self) -> list[int]:
        """Return the neighbours that can be reached now."""
        return [peer for peer in self.neighbours if self.edge(peer) is not None]

    def poll(self) -> None:
        """Answer connection requests and build what was answered.

        Runs in the heartbeat thread, and while a worker comes back also in the thread that waits for that.
        """
        if self._polling.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._polling.release()

    def _poll(self) -> None:
        for peer in self.neighbours:
            if self._closed or self.edge(peer) is not None or peer in self._builders:
                continue
            if self.rank < peer:
                request = self.store.get(f"connect/{self.rank}-{peer}")
                if request is None or self._answered.get(peer) == _name(request):
                    continue
                self._answered[peer] = _name(request)
                name = f"{_name(request)}/{uuid.uuid4().hex}"
                if self.store.set(f"edge/{self.rank}-{peer}", name):
                    self._start_building(peer, name)
            else:
                answer = self.store.get(f"edge/{peer}-{self.rank}")
                name = _name(answer) if answer is not None else ""
                if name.startswith(self._requests[peer] + "/") and self._answered.get(peer) != name:
                    self._answered[peer] = name
                    self._start_building(peer, name)

    def close(self) -> None:
        self._closed = True
        for edge in list(self._edges.values()):
            edge.close()
        with self._lock:
            builders = list(self._builders.values())
        for builder in builders:
            builder.join(BUILD_TIMEOUT_S + CLOSE_TIMEOUT_S)

    def _request(self, peer: int) -> None:
        if peer < self.rank:
            self._requests[peer] = uuid.uuid4().hex
            self.store.set(f"connect/{peer}-{self.rank}", self._requests[peer])

    def _republish(self) -> None:
        for peer, request in self._requests.items():
            if self.edge(peer) is None:
                self.store.set(f"connect/{peer}-{self.rank}", request)

    def _start_building(self, peer: int, name: str) -> None:
        thread = threading.Thread(target=self._build, args=(peer, name), name=f"gossamer-build-{peer}", daemon=True)
        with self._lock:
            # ``close`` joins the listed threads, so they must have been started.
            if not self._closed:
                self._builders[peer] = thread
                thread.start()

    def _build(self, peer: int, name: str) -> None:
        members = (min(self.rank, peer), max(self.rank, peer))
        try:
            group = self.builder.build(
                f"edge/{name}",
                members,
                hopeless=lambda _: self._closed or self._superseded(peer, name),
                low_priority=True,
            )
        except RuntimeError:
            if not self._closed:
                self._request(peer)
        else:
            with self._lock:
                edge = Edge(peer, members.index(self.rank), group, self.on_message, self._lost, name)
                self._edges[peer] = edge
            if self._closed:
                edge.close()
        finally:
            del self._builders[peer]

    def _superseded(self, peer: int, name: str) -> bool:
        """Return whether ``peer`` has published a newer request: it will not build the edge of this name."""
        request = self.store.get(f"connect/{self.rank}-{peer}") if self.rank < peer else None
        return request is not None and not name.startswith(_name(request) + "/")

    def _lost(self, edge: Edge) -> None:
        if not self._closed:
            self.num_lost += int(self._counts_as_lost())
            self._request(edge.peer)


def _name(published: bytes) -> str:
    """Return the name of a request or an edge. One that was not made by a worker fits no answer."""
    return published[:MAX_NAME_BYTES].decode("ascii", errors="replace")
