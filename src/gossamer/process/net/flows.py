"""Sends and receives over several connections at once.

Short messages are sent and received in turns by the thread that calls. Long ones take many system calls in that way,
and after each the thread waits for the interpreter, which the training needs too. So a second thread sends them while
the first receives, with calls that block until all is done and hold no lock meanwhile. TLS has no such calls.

What arrives is described by a generator that yields the memory to fill next. Between two yields it may compute, and
queue more to send: that is how a sum travels around a ring while its next part arrives.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.process.net.connection import Connection

Incoming = Generator[memoryview, None, None]
"""Yields the memory to fill next; its end is the end of what this flow receives."""

CHECK_S = 0.5
BULK_BYTES = 1 << 19
"""Vectors from this size on are moved by two threads."""

_IDLE_S = 0.05
"""How often the sending thread looks for what other threads have queued."""

MAX_BUFFERS = 16
"""So many buffers are offered to one system call."""


@dataclass
class Flow:
    """What goes over one connection."""

    connection: Connection
    outgoing: deque[memoryview] = field(default_factory=deque)
    """What is to be sent. Other threads may append to it as well."""
    incoming: Incoming | None = None
    view: memoryview | None = None
    """What is to be filled next."""

    def advance(self) -> None:
        """Let the generator say what to fill next; it skips what is empty."""
        assert self.incoming is not None
        try:
            while not (view := next(self.incoming)).nbytes:
                pass
            self.view = view
        except StopIteration:
            self.incoming = self.view = None

    def receive(self) -> bool:
        """Receive what is there; return whether that was something."""
        if self.view is None:
            return False
        received = self.connection.receive_some(self.view)
        if received is None:
            return False
        self.filled(received)
        return True

    def filled(self, received: int) -> None:
        """So many bytes have arrived."""
        assert self.view is not None
        self.view = self.view[received:]
        if not self.view.nbytes:
            self.advance()

    def send(self) -> bool:
        """Send what the kernel takes; return whether that was something."""
        return bool(self.outgoing) and send_queued(self.connection, self.outgoing)

    @property
    def events(self) -> int:
        """What this flow waits for."""
        return (select.POLLIN if self.view is not None else 0) | (select.POLLOUT if self.outgoing else 0)


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


def fill(views: Iterable[memoryview]) -> Incoming:
    """Receive into these, one after the other."""
    yield from views


def both(one: Incoming, other: Incoming) -> Incoming:
    yield from one
    yield from other


def view(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    if not tensor.is_contiguous():
        raise ValueError("a tensor that is sent or received must be contiguous")
    memory: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(memory)


def run(flows: Sequence[Flow], deadline: float, check: Callable[[], None] = lambda: None, num_bytes: int = 0) -> None:
    """Move everything; TimeoutError or ConnectionError if that does not succeed. ``deadline``: of ``time.monotonic()``.

    ``check()`` is called now and then while this thread waits, and may raise. ``num_bytes``: about how much it is. Of
    much, what arrives is received flow by flow, in this order.
    """
    is_bulk = num_bytes >= BULK_BYTES and not any(flow.connection.is_tls for flow in flows)
    with contextlib.ExitStack() as stack:
        for flow in flows:
            # A descriptor that another thread closes may soon be that of another connection.
            stack.enter_context(flow.connection.in_use())
        (_run_bulk if is_bulk else _run_in_turns)(flows, deadline, check)


def _run_bulk(flows: Sequence[Flow], deadline: float, check: Callable[[], None]) -> None:
    sender = _Sender(flows, deadline)
    try:
        for flow in flows:
            if flow.incoming is not None:
                flow.advance()
            while flow.view is not None:
                received = flow.connection.receive_bulk(flow.view)
                if received:
                    flow.filled(received)
                    sender.wake()
                    continue
                sender.check()
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError("the other end did not answer in time")
        sender.finish(check)
    except BaseException:
        sender.stop()
        raise


class _Sender:
    """A thread that sends what the flows have queued."""

    def __init__(self, flows: Sequence[Flow], deadline: float) -> None:
        self._flows, self._deadline = flows, deadline
        self._changed = threading.Condition()
        self._last = self._stopped = False
        """``_last``: nothing more will be queued."""
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="gossamer-send", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                last = self._last
                for flow in self._flows:
                    while flow.outgoing:
                        if self._stopped:
                            return
                        self._send(flow)
                if last:
                    return
                with self._changed:
                    if not self._last and not any(flow.outgoing for flow in self._flows):
                        self._changed.wait(_IDLE_S)
        except OSError as error:
            self._error = error

    def _send(self, flow: Flow) -> None:
        view = flow.outgoing[0]
        sent = flow.connection.send_bulk(view)
        if sent == view.nbytes:
            flow.outgoing.popleft()
        elif sent:
            flow.outgoing[0] = view[sent:]
        elif time.monotonic() > self._deadline:
            raise TimeoutError("the other end did not answer in time")

    def wake(self) -> None:
        """Something may have been queued."""
        with self._changed:
            self._changed.notify()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until everything is sent."""
        with self._changed:
            self._last = True
            self._changed.notify()
        while self._thread.is_alive():
            self._thread.join(CHECK_S)
            if self._thread.is_alive():
                check()
        self.check()

    def stop(self) -> None:
        """Send nothing more. What is being sent ends within a moment: who fails closes the connection."""
        self._stopped = True
        with self._changed:
            self._last = True
            self._changed.notify()
        self._thread.join()


def _run_in_turns(flows: Sequence[Flow], deadline: float, check: Callable[[], None]) -> None:
    poll = select.poll()
    watched: dict[int, int] = {}
    for flow in flows:
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
