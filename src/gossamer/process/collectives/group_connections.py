"""Connections between the members of groups: the higher rank connects to the lower one when the two first need it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from gossamer.process.collectives.peer_group import PeerGroup
from gossamer.process.net.connection import Address, Connection, connect
from gossamer.process.net.listener import Listener

PURPOSE = "group"
CONNECT_TIMEOUT_S = 5.0
CHECK_S = 0.05
"""How often a member that waits for a connection checks whether its group was closed."""

BUFFER_BYTES = 1 << 22
"""Of the kernel, for each direction of a connection: the more fits in, the less often members wait for each
other's turn on a busy machine."""

HOPELESS_CHECK_S = 0.3
"""How often a worker that waits for members checks whether they can still come: that costs store requests."""

MAX_PARKED = 1024
"""Connections that came before this worker knew their group; one more closes the oldest."""

MAX_REFUSED = 4096
"""Names of groups that are over here; one more forgets the oldest."""


class GroupConnections:
    """Makes the groups of one worker."""

    def __init__(
        self,
        rank: int,
        listener: Listener,
        find_address: Callable[[int], Address | None],
        known_address: Callable[[int], Address | None] = lambda rank: None,
    ) -> None:
        """``known_address(rank)``: where that worker listens as far as this one knows. If it does not,
        ``find_address(rank)`` asks the store."""
        self.rank, self._listener = rank, listener
        self._known_address, self._find_address = known_address, find_address
        self._changed = threading.Condition()
        self._parked: dict[tuple[str, int], Connection] = {}
        """Connections that others have made, by group and rank, until this worker needs them."""
        self._refused: dict[str, None] = {}
        """Groups that are over here, oldest first. Who connects for one of them must not wait for this worker."""
        self._closed = False
        listener.register(PURPOSE, self._accept)

    def group(
        self, name: str, members: tuple[int, ...], hopeless: Callable[[int], bool] = lambda rank: False
    ) -> PeerGroup:
        """Return the group ``name`` of ``members``. A name is used once, by all of its members.

        ``hopeless(rank)``: a member that has not connected yet will not do so any more.
        """

        def connect_to(member: int, deadline: float) -> Connection:
            rank = members[member]
            if rank < self.rank:
                connection = self._connect(name, rank, deadline)
            else:
                connection = self._await(name, rank, deadline, lambda: group.closed, hopeless)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    connection.socket.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
            return connection

        group = PeerGroup(members.index(self.rank), len(members), connect_to, lambda: self.refuse(name))
        return group

    def refuse(self, name: str) -> None:
        """A group is over here: close its connections that were not needed, and those that still come."""
        with self._changed:
            for key in [key for key in self._parked if key[0] == name]:
                self._parked.pop(key).close()
            self._refused[name] = None
            if len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]

    def close(self) -> None:
        """Close what no group has taken, and what comes from now on."""
        with self._changed:
            self._closed = True
            for connection in self._parked.values():
                connection.close()
            self._parked.clear()

    def _connect(self, name: str, rank: int, deadline: float) -> Connection:
        known = self._known_address(rank)
        if known is not None:
            try:
                return self._connect_at(known, name, rank, deadline)
            except ConnectionError:
                # Another process of it may have taken its place. One that does not answer is unreachable, or hangs.
                address = self._find_address(rank)
                if address in (None, known):
                    raise
        else:
            address = self._find_address(rank)
        if address is None:
            raise ConnectionError(f"worker {rank} has not published where it listens")
        return self._connect_at(address, name, rank, deadline)

    def _connect_at(self, address: Address, name: str, rank: int, deadline: float) -> Connection:
        timeout_s = min(max(deadline - time.monotonic(), 0.001), CONNECT_TIMEOUT_S)
        connection = connect(address, PURPOSE, name.encode(), identity=self._listener.identity, timeout_s=timeout_s)
        if connection.peer_rank != rank:
            connection.close()
            raise ConnectionError(f"worker {rank} does not listen at {address[0]}:{address[1]} any more")
        return connection

    def _await(
        self,
        name: str,
        rank: int,
        deadline: float,
        closed: Callable[[], bool],
        hopeless: Callable[[int], bool],
    ) -> Connection:
        checked = time.monotonic()
        while True:
            with self._changed:
                if (name, rank) not in self._parked:
                    self._changed.wait(CHECK_S)
                if (name, rank) in self._parked:
                    return self._parked.pop((name, rank))
            now = time.monotonic()
            if closed():
                raise ConnectionError("the group is closed")
            if now > deadline:
                raise TimeoutError(f"worker {rank} has not connected")
            if now - checked > HOPELESS_CHECK_S:
                checked = now
                if hopeless(rank):
                    raise ConnectionError(f"worker {rank} will not connect")

    def _accept(self, connection: Connection, hello: bytes) -> None:
        if connection.peer_rank is None or connection.peer_rank <= self.rank:
            connection.close()
            return
        with self._changed:
            name = hello.decode(errors="replace")
            if self._closed or name in self._refused:
                connection.close()
                return
            key = name, connection.peer_rank
            earlier = self._parked.pop(key, None)
            if earlier is None and len(self._parked) >= MAX_PARKED:
                earlier = self._parked.pop(next(iter(self._parked)))
            if earlier is not None:
                earlier.close()
            self._parked[key] = connection
            self._changed.notify_all()
