"""The connection between two neighbours: small messages at any time, and vectors traded both ways at once.

It is a process group of just these two, so whatever happens to one edge happens to no other. A thread listens for the
peer's messages; they are four whole numbers each, and nothing that arrives is ever unpickled or executed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gossamer.process.collectives.gloo import PairExchange, sever

MESSAGE = 1
"""The tag of messages; vectors have others."""

WORDS = 4
AHEAD = 4
"""Receives posted ahead of the messages."""

CLOSE_S = 1.0
SILENCE = timedelta(days=365)
"""How long an edge may be silent: death is noticed by the connection, silence is no reason to close it."""


class Lost(Exception):
    """The peer is gone, or did not answer in time; the edge is closed."""


class Edge:
    """An open connection to ``peer``."""

    def __init__(
        self,
        peer: int,
        side: int,
        group: Any,
        hear: Callable[[Edge, tuple[int, ...]], None],
        lost: Callable[[Edge], None],
        name: str,
    ) -> None:
        self.peer, self._other, self._group, self.name = peer, 1 - side, group, name
        self.num_swaps = 0
        """The same at both ends, where nothing was lost; what was lost closes the edge."""
        self._hear, self._lost = hear, lost
        self.open = True
        self._sending = threading.Lock()
        self._listener = threading.Thread(target=self._listen, name=f"gossamer-edge-{peer}", daemon=True)
        self._listener.start()

    def tell(self, *words: int, within_s: float) -> None:
        """Send a small message."""
        message = torch.tensor(words + (0,) * (WORDS - len(words)), dtype=torch.int64)
        within = timedelta(seconds=max(within_s, 0.001))
        with self._sending:
            self._guard(lambda: self._group.send([message], self._other, MESSAGE).wait(within))

    def swap(self, sent: Tensor, received: Tensor, within_s: float) -> None:
        """Send one vector and receive another of the same length."""
        self._guard(lambda: PairExchange(self._group, sent, received).wait(within_s))
        self.num_swaps += 1

    def close(self) -> None:
        """Let go for good; nothing is heard any more when this returns."""
        self.drop()
        self._listener.join(CLOSE_S)

    def _listen(self) -> None:
        # A send waits until its receive is posted, and answers are sent by whoever listens: were there only one receive
        # at a time, two listeners that answer each other would wait for ever.
        buffers = deque(torch.zeros(WORDS, dtype=torch.int64) for _ in range(AHEAD))
        try:
            posted = deque(self._group.recv([buffer], self._other, MESSAGE) for buffer in buffers)
            while True:
                posted.popleft().wait(SILENCE)
                words = tuple(buffers[0].tolist())
                buffers.rotate(-1)
                posted.append(self._group.recv([buffers[-1]], self._other, MESSAGE))
                self._hear(self, words)
        except RuntimeError:
            pass
        self.drop()

    def _guard(self, communicate: Callable[[], object]) -> None:
        try:
            communicate()
        except RuntimeError as error:
            self.drop()
            raise Lost(f"worker {self.peer}: {error}") from None

    def drop(self) -> None:
        """Give the edge up; the peer notices."""
        if self.open:
            self.open = False
            sever(self._group)
            self._lost(self)
