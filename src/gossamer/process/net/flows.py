"""Sends and receives over several connections at once, in the thread that calls.

What arrives is described by a generator that yields the memory to fill next. Between two yields it may compute, and
queue more to send: that is how a sum travels around a ring while its next part arrives.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from gossamer.process.net.connection import Connection

Incoming = Generator[memoryview, None, None]
"""Yields the memory to fill next; its end is the end of what this flow receives."""

CHECK_S = 0.5
MAX_BUFFERS = 16
"""So many buffers are offered to one system call."""


@dataclass
class Flow:
    """What goes over one connection."""

    connection: Connection
    outgoing: deque[memoryview] = field(default_factory=deque)
    """What is to be sent. Other threads may append to it as well."""
    incoming: Incoming | None = None
    _view: memoryview | None = None
    """What is to be filled next."""

    def advance(self) -> None:
        """Let the generator say what to fill next; it skips what is empty."""
        assert self.incoming is not None
        try:
            while not (view := next(self.incoming)).nbytes:
                pass
            self._view = view
        except StopIteration:
            self.incoming = self._view = None

    def receive(self) -> bool:
        """Receive what is there; return whether that was something."""
        if self._view is None:
            return False
        received = self.connection.receive_some(self._view)
        if received is None:
            return False
        self._view = self._view[received:]
        if not self._view.nbytes:
            self.advance()
        return True

    def send(self) -> bool:
        """Send what the kernel takes; return whether that was something."""
        return bool(self.outgoing) and send_queued(self.connection, self.outgoing)

    @property
    def events(self) -> int:
        """What this flow waits for."""
        return (select.POLLIN if self._view is not None else 0) | (select.POLLOUT if self.outgoing else 0)


def send_queued(connection: Connection, queue: deque[memoryview]) -> bool:
    """Send as much of ``queue`` as the kernel takes now; return whether that was something."""
    # Others append meanwhile, but nobody else takes from it.
    sent = connection.send_some(*(queue[index] for index in range(min(len(queue), MAX_BUFFERS))))
    if sent is None:
        return False
    while sent and sent >= queue[0].nbytes:
        sent -= queue.popleft().nbytes
    if sent:
        queue[0] = queue[0][sent:]
    return True


def run(flows: Sequence[Flow], deadline: float, check: Callable[[], None] = lambda: None) -> None:
    """Move everything; TimeoutError or ConnectionError if that does not succeed. ``deadline``: of ``time.monotonic()``.

    ``check()`` is called now and then while this thread waits, and may raise.
    """
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        watched: dict[int, int] = {}
        for flow in flows:
            # A descriptor that another thread closes may soon be that of another connection.
            stack.enter_context(flow.connection.in_use())
            if flow.incoming is not None:
                flow.advance()
        while True:
            moved = True
            while moved:
                moved = False
                for flow in flows:
                    # First what arrives: it may make room at the other end.
                    moved |= flow.receive()
                    moved |= flow.send()
            wanted: dict[int, int] = {}
            for flow in flows:
                if flow.events:
                    descriptor = flow.connection.fileno()
                    wanted[descriptor] = wanted.get(descriptor, 0) | flow.events
            if not wanted:
                return
            for descriptor in watched.keys() - wanted.keys():
                poll.unregister(descriptor)
            for descriptor, events in wanted.items():
                if watched.get(descriptor) != events:
                    poll.register(descriptor, events)
            watched = wanted
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the other end did not answer in time")
            if not poll.poll(min(left_s, CHECK_S) * 1000):
                check()
