"""Watches the ranks of a replica: when one dies, the others end too, with a line that says why.

A rank that is lost leaves the others in a collective of the user's own parallelism, in which they may hang: NCCL waits
for minutes. So the first rank of a replica accepts a connection of each other one. A connection that breaks without a
word means that its rank is dead, and the first rank tells the others. Each leaves the other replicas at once, so that
they do not wait for it, and has some time to end by itself. Over the same connections the first rank tells the others
what it has decided (``boundary``, ``train/replica/step_decision``).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable

from gossamer.errors import InputError
from gossamer.process.replica.inner_group import InnerGroup

CONNECT_TIMEOUT_S = 60.0
DIED_GRACE_S = 2.0
"""How long a rank may take to end by itself, with the error of its own collective, when another one has died."""

LEFT_GRACE_S = 30.0
"""How long a rank may go on when another one has left without ``finish``: all may be about to."""

POLL_S = 0.2
MAX_LINE_BYTES = 200
KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
"""A machine that is off breaks no connection: the kernel notices after ten seconds."""

FINISHED, LEFT, DIED, MESSAGE, REFUSED = "finished", "left", "died", "message", "refused"
RECEIVE_BYTES = 1 << 16


class ReplicaWatch:
    """One rank's connections to the others of its replica."""

    def __init__(self, inner: InnerGroup, host: str) -> None:
        """``host``: the address of this machine."""
        self.inner = inner
        self.on_loss: Callable[[str], None] = lambda text: None
        """Called once if another rank dies, with what is said of it."""
        self.on_message: dict[str, Callable[[str], None]] = {}
        """Called in the thread of this watch with each message, by its first word. Set before ``start``."""
        self.lost = ""
        """Which rank has died, in words; empty while none has."""
        self.left = ""
        """Which rank has left without ``finish``, in words."""
        self.refused = ""
        """Why another rank could not join: the line that it raised."""
        self._peers: dict[int, socket.socket] = {}
        self._received: dict[int, bytes] = {}
        """What has come of a line that is not complete yet."""
        self._sending = threading.Lock()
        self._told: set[int] = set()
        """The ranks that have said goodbye, or are known to be dead."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if inner.size > 1:
            self._connect(host)

    @property
    def gone(self) -> str:
        """Why no more messages will come, in words; empty while all ranks are there."""
        return self.lost or self.left

    def start(self) -> None:
        """Begin to watch and to receive."""
        if self._peers:
            self._thread = threading.Thread(target=self._run, name="gossamer-replica", daemon=True)
            self._thread.start()

    def _connect(self, host: str) -> None:
        first = self.inner.shard == 0
        server = socket.create_server((host, 0)) if first else None
        port = server.getsockname()[1] if server else 0
        published = self.inner.gather_bytes(f"{host} {port} {secrets.token_hex(16)}".encode())[0].decode()
        address, port_text, token = published.split()
        try:
            if server is None:
                peer = socket.create_connection((address, int(port_text)), CONNECT_TIMEOUT_S)
                peer.sendall(f"{token} {self.inner.shard}\n".encode())
                self._peers[0] = peer
            else:
                self._accept(server, token)
        except OSError as error:
            raise InputError(
                f"the ranks of this replica ({self.inner.ranks}) cannot connect to {address} ({error}): "
                "they must reach each other"
            ) from None
        finally:
            if server is not None:
                server.close()
        for peer in self._peers.values():
            peer.settimeout(None)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                if hasattr(socket, name):
                    peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _accept(self, server: socket.socket, token: str) -> None:
        until = time.monotonic() + CONNECT_TIMEOUT_S
        while len(self._peers) < self.inner.size - 1:
            server.settimeout(max(0.01, until - time.monotonic()))
            peer, _ = server.accept()
            peer.settimeout(CONNECT_TIMEOUT_S)
            given, _, shard = _read_line(peer).partition(" ")
            known = shard.isdigit() and 0 < int(shard) < self.inner.size and int(shard) not in self._peers
            # Anybody may connect to a port.
            if known and hmac.compare_digest(given.encode(), token.encode()):
                self._peers[int(shard)] = peer
            else:
                peer.close()

    # The thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for shard, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, shard)
            while not self._closed.is_set() and selector.get_map():
                for key, _ in selector.select(POLL_S):
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)

    def _read(self, peer: int) -> bool:
        """Read what has come of a peer; return whether more may follow."""
        data = b""
        with contextlib.suppress(OSError):
            data = self._peers[peer].recv(RECEIVE_BYTES)
        *lines, self._received[peer] = (self._received.get(peer, b"") + data).split(b"\n")
        for line in lines:
            what, _, rest = line.decode(errors="replace").partition(" ")
            if what == MESSAGE:
                kind, _, text = rest.partition(" ")
                self.on_message[kind](text)
            elif what == REFUSED:
                shard, _, why = rest.partition(" ")
                self.refused = self.refused or why
                self._ended(int(shard) if shard.isdigit() else peer, LEFT, why)
            else:
                self._ended(int(rest) if rest.isdigit() else peer, what)
        if not data:
            self._ended(peer, DIED)
        return bool(data)

    def _ended(self, shard: int, how: str, why: str = "") -> None:
        """A rank has finished, left or died. ``why``: if it could not join."""
        if shard in self._told:
            return
        self._told.add(shard)
        if self.inner.shard == 0:
            self._tell(f"{REFUSED} {shard} {why}" if why else f"{how} {shard}", but=shard)
        if how in (DIED, LEFT) and not self._closed.is_set():
            threading.Thread(target=self._lost, args=(shard, how), daemon=True).start()

    def _lost(self, shard: int, how: str) -> None:
        """Say that a rank is lost, and end this process unless it ends by itself."""
        rank = self.inner.ranks[shard]
        text = f"rank {rank} of this replica {how}: the replica (ranks {self.inner.ranks}) is gone, and this rank ends"
        try:
            if how == DIED:
                self.lost = text
                self.on_loss(text)
            else:
                self.left = text
        finally:
            if not self._closed.wait(DIED_GRACE_S if how == DIED else LEFT_GRACE_S):
                print(f"gossamer: {text}", file=sys.stderr, flush=True)
                # The training thread may hang in a collective, where no exception reaches it.
                os._exit(1)

    def _tell(self, line: str, but: int | None = None) -> None:
        with self._sending:
            for shard, peer in self._peers.items():
                if shard != but:
                    with contextlib.suppress(OSError):
                        peer.sendall(f"{line}\n".encode())

    def send(self, message: str) -> None:
        """Send a message, a word and a text without a line break, from the first rank to all others or from another one
        to the first. Messages arrive in this order.
        """
        self._tell(f"{MESSAGE} {message}")

    def close(self, finished: bool, why: str = "") -> None:
        """Say goodbye. ``finished``: in order, after ``finish``; otherwise the replica cannot go on.

        ``why``: this rank could not join. The others raise the same line.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        line = " ".join(why.split())
        self._tell(
            f"{REFUSED} {self.inner.shard} {line}" if line else f"{FINISHED if finished else LEFT} {self.inner.shard}"
        )
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * POLL_S)
        for peer in self._peers.values():
            peer.close()


def _read_line(peer: socket.socket) -> str:
    """Return the next line of a peer; empty if the connection is broken."""
    line = b""
    with contextlib.suppress(OSError):
        while len(line) < MAX_LINE_BYTES:
            byte = peer.recv(1)
            if byte in (b"", b"\n"):
                return line.decode(errors="replace") if byte else ""
            line += byte
    return ""
