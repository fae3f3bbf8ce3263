"""A worker's edges to its neighbours, built and rebuilt as they come and go.

For each missing edge the higher rank leaves a *wish* at the meeting point, under a name never used before. The lower
rank answers a new wish with the name under which both build the edge. Whoever restarts, wakes up or loses an edge only
has to wish again; a peer that is gone wishes nothing and costs nothing but a look now and then.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

from gossamer.process.edge import Edge
from gossamer.process.gloo import make_group
from gossamer.process.meeting_point import MeetingPoint

BUILD_S = 5.0
CLOSE_S = 2.0


class Neighbourhood:
    """The edges of worker ``rank``."""

    def __init__(
        self,
        rank: int,
        neighbours: tuple[int, ...],
        point: MeetingPoint,
        hear: Callable[[Edge, tuple[int, ...]], None],
    ) -> None:
        self.rank, self.neighbours, self.point, self.hear = rank, neighbours, point, hear
        self._lock = threading.Lock()
        self._edges: dict[int, Edge] = {}
        self._wishes: dict[int, str] = {}
        self._answered: dict[int, str] = {}
        self._building: dict[int, threading.Thread] = {}
        self._closed = False
        self.lost = 0
        for peer in neighbours:
            self._wish(peer)
        point.moved.append(self._wish_again)

    def edge(self, peer: int) -> Edge | None:
        """The edge to ``peer``, if it is open."""
        edge = self._edges.get(peer)
        return edge if edge is not None and edge.open else None

    def open(self) -> list[int]:
        """Neighbours that can be reached now."""
        return [peer for peer in self.neighbours if self.edge(peer) is not None]

    def tend(self) -> None:
        """Answer wishes, and build what was answered."""
        for peer in self.neighbours:
            if self._closed or self.edge(peer) is not None or peer in self._building:
                continue
            if self.rank < peer:
                wish = self.point.get(f"wish/{self.rank}-{peer}")
                if wish is None or self._answered.get(peer) == wish.decode():
                    continue
                self._answered[peer] = wish.decode()
                name = f"{wish.decode()}/{uuid.uuid4().hex}"
                if self.point.set(f"edge/{self.rank}-{peer}", name):
                    self._build(peer, name)
            else:
                found = self.point.get(f"edge/{peer}-{self.rank}")
                name = found.decode() if found is not None else ""
                if name.startswith(self._wishes[peer] + "/") and self._answered.get(peer) != name:
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

    def _wish(self, peer: int) -> None:
        if peer < self.rank:
            self._wishes[peer] = uuid.uuid4().hex
            self.point.set(f"wish/{peer}-{self.rank}", self._wishes[peer])

    def _wish_again(self) -> None:
        for peer, wish in self._wishes.items():
            if self.edge(peer) is None:
                self.point.set(f"wish/{peer}-{self.rank}", wish)

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
            store = self.point.store(BUILD_S, lambda: self._closed or self._over(peer, name))
            group = make_group(store, f"edge/{name}", side, 2, BUILD_S, beside=True)
        except RuntimeError:
            if not self._closed:
                self._wish(peer)
        else:
            with self._lock:
                edge = self._edges[peer] = Edge(peer, side, group, self.hear, self._gone, name)
            if self._closed:
                edge.close()
        finally:
            del self._building[peer]

    def _over(self, peer: int, name: str) -> bool:
        """Whether ``peer`` wishes anew: it does not come to build the edge of this name any more."""
        wish = self.point.get(f"wish/{self.rank}-{peer}") if self.rank < peer else None
        return wish is not None and not name.startswith(wish.decode() + "/")

    def _gone(self, edge: Edge) -> None:
        self.lost += 1
        if not self._closed:
            self._wish(edge.peer)
