"""An edge: the connection between two neighbours, for small messages at any time and for exchanges of vectors.

An edge is a process group of two, so a failure of one edge affects no other. A thread receives the peer's messages:
four integers each, so nothing that arrives is unpickled or executed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gossamer.process.collectives.gloo import Exchange, disconnect

MESSAGE_TAG = 1
"""``gloo.Exchange`` uses other tags."""

MESSAGE_LENGTH = 4
NUM_POSTED = 4
"""Receives posted ahead of the messages."""

CLOSE_TIMEOUT_S = 1.0
NO_TIMEOUT = timedelta(days=365)
"""A silent edge stays open: a peer's death closes its connection, silence does not mean death."""


class EdgeLost(Exception):
    """The peer died or did not answer in time; the edge is closed."""


class Edge:
    def __init__(
        self,
        peer: int,
        side: int,
        group: Any,
        on_message: Callable[[Edge, tuple[int, ...]], None],
        on_lost: Callable[[Edge], None],
        name: str,
    ) -> None:
        """``side``: our rank in ``group``, 0 or 1. ``name``: unique, and the same at both ends."""
        self.peer, self._peer_side, self._group, self.name = peer, 1 - side, group, name
        self.num_exchanges = 0
        """The same at both ends: an exchange that fails closes the edge."""
        self.layout: tuple[float, float, float] | None = None
        """Length, bytes per element and number of scalars of the exchanges over this edge, once both ends agree."""
        self._on_message, self._on_lost = on_message, on_lost
        self.open = True
        self._send_lock = threading.Lock()
        self._receiver = threading.Thread(target=self._receive, name=f"gossamer-edge-{peer}", daemon=True)
        self._receiver.start()

    def send(self, *message: int, timeout_s: float) -> None:
        tensor = torch.tensor(message + (0,) * (MESSAGE_LENGTH - len(message)), dtype=torch.int64)
        timeout = timedelta(seconds=max(timeout_s, 0.001))
        with self._send_lock:
            self._guard(lambda: self._group.send([tensor], self._peer_side, MESSAGE_TAG).wait(timeout))

    def exchange(
        self, sent: Tensor | None, received: Tensor | None, timeout_s: float, words: Sequence[float] = ()
    ) -> list[float]:
        """Send a vector, receive another of the length that the peer sends, or both; return the peer's words."""
        theirs: list[float] = []
        self._guard(lambda: Exchange(self._group, sent, received, words=words, received_words=theirs).wait(timeout_s))
        self.num_exchanges += 1
        return theirs

    def close(self) -> None:
        """Close the edge; no message is delivered after this returns."""
        self.drop()
        self._receiver.join(CLOSE_TIMEOUT_S)

    def _receive(self) -> None:
        # A send waits until its receive is posted, and the receiving thread sends the replies. With one posted receive
        # at a time, two receivers that reply to each other would deadlock.
        buffers = deque(torch.zeros(MESSAGE_LENGTH, dtype=torch.int64) for _ in range(NUM_POSTED))
        try:
            posted = deque(self._group.recv([buffer], self._peer_side, MESSAGE_TAG) for buffer in buffers)
            while True:
                posted.popleft().wait(NO_TIMEOUT)
                message = tuple(buffers[0].tolist())
                buffers.rotate(-1)
                posted.append(self._group.recv([buffers[-1]], self._peer_side, MESSAGE_TAG))
                self._on_message(self, message)
        except RuntimeError:
            pass
        self.drop()

    def _guard(self, communicate: Callable[[], object]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            self.drop()
            raise EdgeLost(f"worker {self.peer}: {error}") from None

    def drop(self) -> None:
        """Disconnect; the peer notices."""
        if self.open:
            self.open = False
            disconnect(self._group)
            self._on_lost(self)
