"""An edge: the connection between two neighbours, for small messages at any time and for exchanges of vectors.

Everything travels in frames of four integers; that of a vector is followed by its words and its bytes. A loop that
serves all edges receives the small messages. During an exchange the thread that makes it receives instead, straight
into the memory of the vector.

**Whether an exchange took place** must be the same at both ends: the mean of all workers would move if only one of them
merged. The end with the lower rank decides. Once it has the other's vector, and the *receipt* for its own, it commits
and says so. The other end has sent its receipt then, and is *in doubt* until it hears of the commit. If the edge breaks
meanwhile, it waits for the next edge between the two, whose first frame says how many exchanges each end has committed
(``PeerConnections.settle``). It gives up when the deciding end cannot commit any more: the frame of a vector says how
long that end is willing to wait.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from gossamer.process.net import flows
from gossamer.process.net.connection import Connection
from gossamer.process.net.flows import Flow, Incoming, view
from gossamer.process.net.loop import READ, WRITE, Loop

MESSAGE_LENGTH = 4
_FRAME = struct.Struct(f"<{MESSAGE_LENGTH}q")
_VECTOR, _RECEIPT, _COMMIT, _COMMITTED = -1, -2, -3, -4
"""First numbers of frames that are no message. ``_VECTOR``: bytes, number of words, microseconds that its sender waits.
``_COMMITTED``, the first frame of an edge: how many exchanges its sender has committed with the other end."""

MAX_WORDS = 64
FRAMES_PER_TURN = 16
"""One edge must not keep the others from their turn."""

CLOCK_SLACK_S = 0.5


class EdgeLost(Exception):
    """The peer died or did not answer in time; the edge is closed."""


class EdgeEvents(NamedTuple):
    """What an edge calls, in any thread."""

    on_message: Callable[[Edge, tuple[int, ...]], None]
    on_committed: Callable[[Edge, int], None]
    """The first frame has come: so many exchanges has the peer committed with this process."""
    on_lost: Callable[[Edge], None]
    commit: Callable[[Edge], None]
    """An exchange is committed: count it."""
    settle: Callable[[Edge, float], bool]
    """``settle(edge, until)`` returns whether the peer has committed the exchange in which the edge broke."""


class Edge:
    def __init__(
        self,
        peer: int,
        decides: bool,
        connection: Connection,
        loop: Loop,
        events: EdgeEvents,
        name: str,
        committed: int,
    ) -> None:
        """``decides``: whether this end decides on exchanges. ``name``: unique, and the same at both ends.

        ``committed``: how many exchanges this process has committed with the peer's. In the thread of ``loop``.
        """
        self.peer, self.decides, self.connection, self.name = peer, decides, connection, name
        self.num_exchanges = 0
        """The same at both ends: an exchange that fails closes the edge."""
        self.layout: tuple[float, float, float] | None = None
        """Length, bytes per element and number of scalars of the exchanges over this edge, once both ends agree."""
        self._loop, self._events = loop, events
        self.open = True
        self._state_lock = threading.Lock()
        """Orders a commit and the end of the edge."""
        self._outgoing: deque[memoryview] = deque([_frame(_COMMITTED, committed)])
        self._sending = threading.Lock()
        """Held by who takes from the queue."""
        self._reading = threading.Lock()
        """Held by who receives."""
        self._partial = bytearray(_FRAME.size)
        self._num_partial = 0
        self._ahead: tuple[int, ...] | None = None
        """The frame of a vector that came before this end began its exchange."""
        # The descriptor stays ours until the loop lets go of it.
        self._held = contextlib.ExitStack()
        self._held.enter_context(connection.in_use())
        loop.watch(connection, READ | WRITE, self._ready)

    # From any thread

    def send(self, *message: int) -> None:
        """Send a message, without waiting."""
        if not self.open:
            raise EdgeLost(f"worker {self.peer}")
        self._outgoing.append(_frame(*message))
        self._flush()

    def exchange(
        self, sent: Tensor | None, received: Tensor | None, timeout_s: float, words: Sequence[float] = ()
    ) -> list[float]:
        """Send a vector, receive another of the length that the peer sends, or both; return the peer's words.

        EdgeLost if it did not take place. If both send and receive, it took place at both ends or at none.
        """
        exchange = _Exchange(self, sent, received, timeout_s, words)
        try:
            with self._reading, self._sending:
                exchange.run()
        except OSError as error:
            self.drop()
            doubt_until = exchange.doubt_until
            if not exchange.committed and (doubt_until is None or not self._events.settle(self, doubt_until)):
                raise EdgeLost(f"worker {self.peer}: {error}") from None
        finally:
            self._loop.call_soon(self._resume)
        self.num_exchanges += 1
        return exchange.peer_words

    def drop(self) -> None:
        """Disconnect; both ends notice."""
        with self._state_lock:
            if not self.open:
                return
            self.open = False
        self.connection.close()
        self._loop.call_soon(self._let_go)
        self._events.on_lost(self)

    def _flush(self) -> None:
        """Send what is queued, unless another thread does."""
        try:
            while self._outgoing and self._sending.acquire(blocking=False):
                try:
                    blocked = not flows.send_queued(self.connection, self._outgoing)
                finally:
                    self._sending.release()
                if blocked:
                    self._loop.call_soon(self._watch)
                    return
        except OSError:
            self.drop()

    # In the thread of the loop

    def _watch(self) -> None:
        if self.open:
            events = READ | WRITE if self._outgoing else READ
            self._loop.watch(self.connection, events, self._ready)

    def _let_go(self) -> None:
        self._loop.unwatch(self.connection)
        self._held.close()

    def _resume(self) -> None:
        """An exchange is over."""
        self._watch()
        if self.open:
            self._ready(READ | WRITE)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if not self._reading.acquire(blocking=False):
            # A thread is in an exchange, and resumes this when it is over.
            self._loop.unwatch(self.connection)
            return
        try:
            self._receive_messages()
            if self._ahead is None:
                self._watch()
            else:
                self._loop.unwatch(self.connection)
        except OSError:
            self.drop()
        finally:
            self._reading.release()

    def _receive_messages(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            if self._ahead is not None:
                return
            while self._num_partial < _FRAME.size:
                received = self.connection.receive_some(memoryview(self._partial)[self._num_partial :])
                if received is None:
                    return
                self._num_partial += received
            frame = self._take_frame()
            if frame[0] == _VECTOR:
                self._ahead = frame
            else:
                self._handle(frame)
        # What TLS has decrypted does not make the socket readable.
        self._loop.call_soon(self._resume)

    # By who receives

    def next_frame(self) -> Incoming:
        """Receive up to the next frame that is no message; it is in ``_ahead`` then."""
        while self._ahead is None:
            while self._num_partial < _FRAME.size:
                missing = memoryview(self._partial)[self._num_partial :]
                self._num_partial = _FRAME.size
                yield missing
            frame = self._take_frame()
            if frame[0] in (_VECTOR, _RECEIPT, _COMMIT):
                self._ahead = frame
            else:
                self._handle(frame)

    def take_ahead(self) -> tuple[int, ...]:
        frame, self._ahead = self._ahead, None
        assert frame is not None
        return frame

    def _take_frame(self) -> tuple[int, ...]:
        self._num_partial = 0
        return _FRAME.unpack(self._partial)

    def _handle(self, frame: tuple[int, ...]) -> None:
        if frame[0] > 0:
            self._events.on_message(self, frame)
        elif frame[0] == _COMMITTED:
            self._events.on_committed(self, frame[1])
        else:
            raise ConnectionError(f"worker {self.peer} sent frame {frame[0]} outside of an exchange")

    def queue(self, *views: memoryview) -> None:
        """Queue what belongs together: messages of other threads come before or after it."""
        self._outgoing.extend(each for each in views if each.nbytes)

    def flow(self, incoming: Incoming) -> Flow:
        return Flow(self.connection, self._outgoing, incoming)

    def decide(self) -> None:
        """Commit the exchange, unless the edge has broken: the peer may be told any time now that it was not."""
        with self._state_lock:
            if not self.open:
                raise ConnectionError("the edge is closed")
            self._events.commit(self)

    def follow(self) -> None:
        """Commit the exchange: the peer has."""
        self._events.commit(self)


class _Exchange:
    """One exchange over an edge, run by a thread that has the edge for itself."""

    def __init__(
        self, edge: Edge, sent: Tensor | None, received: Tensor | None, timeout_s: float, words: Sequence[float]
    ) -> None:
        self._edge, self._sent, self._received, self._words = edge, sent, received, words
        self._timeout_s = max(timeout_s, 0.001)
        self.peer_words: list[float] = []
        self.committed = False
        """It took place. What fails from then on does not change that."""
        self.doubt_until: float | None = None
        """Set once the peer may have committed: until then it may still do so."""

    def run(self) -> None:
        """OSError if it fails. Unless it is committed or in doubt, it has failed at the other end too."""
        edge = self._edge
        self._until = time.monotonic() + self._timeout_s
        if self._sent is not None:
            words = struct.pack(f"<{len(self._words)}d", *self._words)
            header = _frame(_VECTOR, self._sent.nbytes, len(self._words), round(self._timeout_s * 1e6))
            edge.queue(header, memoryview(words), view(self._sent))
        num_bytes = max(0 if vector is None else vector.nbytes for vector in (self._sent, self._received))
        flows.run([edge.flow(self._incoming())], self._until, num_bytes=num_bytes)

    def _incoming(self) -> Incoming:
        edge, both = self._edge, self._sent is not None and self._received is not None
        if self._received is not None:
            yield from self._receive_vector(both)
        if both and edge.decides:
            yield from self._expect(_RECEIPT)
            if time.monotonic() > self._until:
                raise TimeoutError("the receipt came too late")
            edge.decide()
            self.committed = True
            edge.queue(_frame(_COMMIT))
        elif both:
            yield from self._expect(_COMMIT)
            edge.follow()
            self.committed = True
        elif self._sent is not None:
            yield from self._expect(_RECEIPT)

    def _receive_vector(self, both: bool) -> Incoming:
        edge, received = self._edge, self._received
        assert received is not None
        yield from edge.next_frame()
        kind, num_bytes, num_words, patience_us = edge.take_ahead()
        came = time.monotonic()
        if kind != _VECTOR or num_bytes != received.nbytes or not 0 <= num_words <= MAX_WORDS or patience_us < 0:
            raise ConnectionError(f"worker {edge.peer} sent a vector of {num_bytes} bytes: expected {received.nbytes}")
        words = bytearray(8 * num_words)
        yield memoryview(words)
        self.peer_words = list(struct.unpack(f"<{num_words}d", words))
        yield view(received)
        if not both or not edge.decides:
            if both:
                # The peer has begun before its frame came here.
                self.doubt_until = came + patience_us / 1e6 + CLOCK_SLACK_S
            edge.queue(_frame(_RECEIPT))

    def _expect(self, kind: int) -> Incoming:
        yield from self._edge.next_frame()
        found = self._edge.take_ahead()[0]
        if found != kind:
            raise ConnectionError(f"worker {self._edge.peer} sent frame {found}: expected {kind}")


def _frame(*numbers: int) -> memoryview:
    return memoryview(_FRAME.pack(*numbers, *(0 for _ in range(MESSAGE_LENGTH - len(numbers)))))
