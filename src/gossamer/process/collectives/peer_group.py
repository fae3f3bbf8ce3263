"""Collectives of our own among members that are connected pair by pair, over TCP or TLS.

The result of a collective is the same to the bit on all members: every part of a sum is computed once, or by all in
the same order. A member that dies or closes its connections ends the collective of the others at once.

| collective | messages |
|---|---|
| all-reduce, long | around a ring, in pieces: the sums (reduce-scatter), then the results (all-gather) |
| all-reduce, short | an all-gather, then everybody adds up |
| all-gather, long | around a ring |
| all-gather, short | in log2(n) rounds with distances 1, 2, 4, … (Bruck et al. 1997) |
| broadcast | down a binomial tree |
| all-to-all | n − 1 rounds of pairs |
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.process.net import flows
from gossamer.process.net.connection import Connection
from gossamer.process.net.flows import Flow, Incoming, both, fill, view

NUM_WORDS = 12
"""Numbers that travel along with a vector in an exchange, at most."""

PIECE_BYTES = 1 << 19
"""Sums travel around the ring in pieces of this size: while one is added up, the next one arrives."""

SHORT_BYTES = 1 << 16
"""Up to this size, of all members' parts together, the number of rounds counts, not that of bytes."""

_REDUCE, _GATHER_SHORT, _GATHER_RING, _BROADCAST, _ALL_TO_ALL, _EXCHANGE = range(1, 7)
_HEAD = struct.Struct("<qq")
"""What each member sends first in a collective: which one it is, and the bytes of a part."""

_WORDS = struct.Struct(f"<{NUM_WORDS}d")
_RECEIPT = b"received"


class GroupFailed(RuntimeError):
    """A member died, left, did not answer in time, or is in another collective."""


class Pending:
    """A collective that is to be waited for. Everything happens in ``wait``, in the thread that calls it."""

    def __init__(self, group: PeerGroup, run: Callable[[float], None]) -> None:
        self._group, self._run = group, run

    def wait(self, timeout_s: float, abandoned: Callable[[], bool] = lambda: False) -> None:
        """Communicate; ``GroupFailed`` if that does not succeed in time, or once it is ``abandoned()``."""
        group = self._group
        group.abandoned = abandoned
        try:
            with group.busy:
                self._run(time.monotonic() + timeout_s)
        except OSError as error:
            raise GroupFailed(str(error)) from None
        finally:
            if group.released:
                group.close()


class PeerGroup:
    """One member's view of a group. All members call the same collectives in the same order, from one thread each."""

    def __init__(
        self,
        rank: int,
        size: int,
        connect: Callable[[int, float], Connection],
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """``connect(member, deadline)`` returns the connection to a member, when it is first needed."""
        self._rank, self._size, self._connect, self._on_close = rank, size, connect, on_close
        self._connections: dict[int, Connection] = {}
        self.busy = threading.Lock()
        """Held during a collective."""
        self.abandoned: Callable[[], bool] = lambda: False
        self.closed = self.released = False

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def close(self) -> None:
        """Close all connections: whoever waits here or at their other ends gets ``GroupFailed``."""
        self.closed = True
        for connection in list(self._connections.values()):
            connection.close()
        self._on_close()

    def release(self) -> None:
        """Close all connections once the collective in progress, if any, is over here."""
        self.released = True
        if self.busy.acquire(blocking=False):
            self.busy.release()
            self.close()

    # Collectives. Their arguments are those of torch's process groups.

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Pending:
        """Replace a tensor by the sum over all members."""
        (tensor,) = tensors
        return Pending(self, lambda deadline: self._reduce(tensor, tensor, 1, deadline))

    def mean(self, sent: Tensor, mean: Tensor) -> Pending:
        """Put the mean of ``sent`` over all members into ``mean``, which may be the same tensor."""
        return Pending(self, lambda deadline: self._reduce(sent, mean, self._size, deadline))

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any = None) -> Pending:
        """Gather the tensors of all members, which have the same size."""
        return Pending(self, lambda deadline: self._gather(outputs[0], tensors[0], deadline))

    def broadcast(self, tensors: list[Tensor], root: int) -> Pending:
        """Replace a tensor by that of member ``root``."""
        return Pending(self, lambda deadline: self._broadcast(tensors[0], root, deadline))

    def alltoall_base(self, received: Tensor, sent: Tensor, *_: Any) -> Pending:
        """Send row i of ``sent`` to member i, receive row i of ``received`` from it."""
        return Pending(self, lambda deadline: self._all_to_all(received, sent, deadline))

    def exchange(
        self,
        sent: Tensor | None,
        received: Tensor | None,
        to: int | None = None,
        source: int | None = None,
        words: Sequence[float] = (),
        received_words: list[float] | None = None,
    ) -> Pending:
        """Send a vector to a member, receive one from a member, which may be the same; by default the other of two.

        ``None`` in place of a vector: nothing is sent, or received. ``words``, at most ``NUM_WORDS`` numbers, travel
        along; ``received_words`` gets the other's. Who sends waits until the vector has been received.
        """
        peer = 1 - self._rank
        to, source = peer if to is None else to, peer if source is None else source
        return Pending(
            self, lambda deadline: self._exchange(sent, received, to, source, words, received_words, deadline)
        )

    # How they work

    def _flow(self, flows_by_member: dict[int, Flow], member: int, deadline: float) -> Flow:
        if member not in flows_by_member:
            if member not in self._connections:
                self._connections[member] = self._connect(member, deadline)
                if self.closed:
                    self._connections[member].close()
            flows_by_member[member] = Flow(self._connections[member])
        return flows_by_member[member]

    def _run(self, by_member: dict[int, Flow], deadline: float, num_bytes: int, first: int | None = None) -> None:
        """``first``: the member whose message is received first."""
        ordered = sorted(by_member, key=lambda member: member != first)
        flows.run([by_member[member] for member in ordered], deadline, self._check, num_bytes)

    def _check(self) -> None:
        if self.abandoned():
            raise ConnectionError("the group was given up")

    def _move(
        self,
        kind: int,
        sends: dict[int, list[memoryview]],
        receives: dict[int, Incoming],
        part_bytes: int,
        deadline: float,
    ) -> None:
        """Send to some members and receive from some, which may be the same ones."""
        head = memoryview(_HEAD.pack(kind, part_bytes))
        by_member: dict[int, Flow] = {}
        for member in sorted({*sends, *receives}):
            flow = self._flow(by_member, member, deadline)
            if member in sends:
                flow.outgoing.extend((head, *filter(len, sends[member])))
            if member in receives:
                flow.incoming = _headed(receives[member], kind, member, part_bytes)
        self._run(by_member, deadline, part_bytes)

    def _around(
        self, kind: int, outgoing: deque[memoryview], incoming: Incoming, part_bytes: int, deadline: float
    ) -> None:
        """Send to the following member of the ring while receiving from the preceding one."""
        following, preceding = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        by_member: dict[int, Flow] = {}
        for member in sorted({following, preceding}):
            self._flow(by_member, member, deadline)
        outgoing.appendleft(memoryview(_HEAD.pack(kind, part_bytes)))
        by_member[following].outgoing = outgoing
        by_member[preceding].incoming = _headed(incoming, kind, preceding, part_bytes)
        self._run(by_member, deadline, part_bytes)

    def _reduce(self, sent: Tensor, out: Tensor, divisor: int, deadline: float) -> None:
        """Put the sum of ``sent`` over all members, divided by ``divisor``, into ``out``."""
        if sent.nbytes * self._size <= SHORT_BYTES:
            self._add_gathered(sent, out, divisor, deadline)
        else:
            self._ring_reduce(sent.view(-1), out.view(-1), divisor, deadline)

    def _ring_reduce(self, sent: Tensor, out: Tensor, divisor: int, deadline: float) -> None:
        rank, size = self._rank, self._size
        own = [_pieces(segment) for segment in torch.tensor_split(sent, size)]
        sums = [_pieces(segment) for segment in torch.tensor_split(out, size)]
        in_place = sent.data_ptr() == out.data_ptr()
        scratch = out.new_empty(max(len(piece) for segment in own for piece in segment) if in_place else 0)
        outgoing = deque(view(piece) for piece in own[rank])

        def incoming() -> Incoming:
            for step in range(size - 1):
                segment = (rank - step - 1) % size
                for part, piece in zip(own[segment], sums[segment], strict=True):
                    arrived = scratch[: len(piece)] if in_place else piece
                    yield view(arrived)
                    torch.add(part, arrived, out=piece)
                    if step == size - 2 and divisor != 1:
                        # The sum of this segment is complete: nobody else has to divide it.
                        piece.div_(divisor)
                    outgoing.append(view(piece))
            for step in range(size - 1):
                for piece in sums[(rank - step) % size]:
                    yield view(piece)
                    if step < size - 2:
                        outgoing.append(view(piece))

        self._around(_REDUCE, outgoing, incoming(), out.nbytes, deadline)

    def _add_gathered(self, sent: Tensor, out: Tensor, divisor: int, deadline: float) -> None:
        parts = [torch.empty_like(sent) for _ in range(self._size)]
        self._gather(parts, sent, deadline)
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)
        if divisor != 1:
            out.div_(divisor)

    def _gather(self, outputs: list[Tensor], tensor: Tensor, deadline: float) -> None:
        outputs[self._rank].copy_(tensor)
        views = [view(output) for output in outputs]
        if tensor.nbytes * self._size <= SHORT_BYTES:
            self._gather_short(views, deadline)
        else:
            self._gather_ring(views, deadline)

    def _gather_short(self, parts: list[memoryview], deadline: float) -> None:
        """After the round of distance d a member has the parts of the 2d members from itself on."""
        rank, size, distance = self._rank, self._size, 1
        while distance < size:
            count = min(distance, size - distance)
            sent = [parts[(rank + index) % size] for index in range(count)]
            arriving = [parts[(rank + distance + index) % size] for index in range(count)]
            to, source = (rank - distance) % size, (rank + distance) % size
            self._move(_GATHER_SHORT, {to: sent}, {source: fill(arriving)}, len(parts[0]), deadline)
            distance *= 2

    def _gather_ring(self, parts: list[memoryview], deadline: float) -> None:
        rank, size = self._rank, self._size
        outgoing = deque([parts[rank]])

        def incoming() -> Incoming:
            for step in range(1, size):
                part = parts[(rank - step) % size]
                for start in range(0, len(part), PIECE_BYTES):
                    piece = part[start : start + PIECE_BYTES]
                    yield piece
                    if step < size - 1:
                        outgoing.append(piece)

        self._around(_GATHER_RING, outgoing, incoming(), len(parts[0]), deadline)

    def _broadcast(self, tensor: Tensor, root: int, deadline: float) -> None:
        size, place = self._size, (self._rank - root) % self._size
        whole = view(tensor)
        children = []
        distance = 1
        while distance < size and not place & distance:
            if place + distance < size:
                children.append((place + distance + root) % size)
            distance *= 2
        if place:
            parent = (place - distance + root) % size
            self._move(_BROADCAST, {}, {parent: fill([whole])}, len(whole), deadline)
        # The child with the most children of its own comes first.
        self._move(_BROADCAST, {child: [whole] for child in reversed(children)}, {}, len(whole), deadline)

    def _all_to_all(self, received: Tensor, sent: Tensor, deadline: float) -> None:
        rank, size = self._rank, self._size
        received[rank].copy_(sent[rank])
        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            arriving = fill([view(received[source])])
            self._move(_ALL_TO_ALL, {to: [view(sent[to])]}, {source: arriving}, sent[0].nbytes, deadline)

    def _exchange(
        self,
        sent: Tensor | None,
        received: Tensor | None,
        to: int,
        source: int,
        words: Sequence[float],
        received_words: list[float] | None,
        deadline: float,
    ) -> None:
        by_member: dict[int, Flow] = {}
        for member in sorted({*([] if sent is None else [to]), *([] if received is None else [source])}):
            self._flow(by_member, member, deadline)
        their_words = bytearray(_WORDS.size)

        def vector() -> Incoming:
            if received is not None:
                arriving = fill([memoryview(their_words), view(received)])
                yield from _headed(arriving, _EXCHANGE, source, received.nbytes)
                by_member[source].outgoing.append(memoryview(_RECEIPT))

        def receipt() -> Incoming:
            if sent is not None:
                yield memoryview(bytearray(len(_RECEIPT)))

        if sent is not None:
            padded = (*words, *(0.0 for _ in range(NUM_WORDS - len(words))))
            head = _HEAD.pack(_EXCHANGE, sent.nbytes) + _WORDS.pack(*padded)
            by_member[to].outgoing.append(memoryview(head))
            if sent.nbytes:
                by_member[to].outgoing.append(view(sent))
        if to == source and by_member:
            by_member[to].incoming = both(vector(), receipt())
        else:
            if received is not None:
                by_member[source].incoming = vector()
            if sent is not None:
                by_member[to].incoming = receipt()
        num_bytes = max(0 if tensor is None else tensor.nbytes for tensor in (sent, received))
        # In a ring of members that all waited for the receipt first, nobody would receive a vector.
        self._run(by_member, deadline, num_bytes, first=source)
        if received_words is not None:
            received_words[:] = _WORDS.unpack(their_words)


def _pieces(segment: Tensor) -> Sequence[Tensor]:
    return segment.split(max(PIECE_BYTES // segment.element_size(), 1)) if len(segment) else ()


def _headed(incoming: Incoming, kind: int, member: int, part_bytes: int) -> Incoming:
    """Check that the member is in the same collective first."""
    head = bytearray(_HEAD.size)
    yield memoryview(head)
    theirs = _HEAD.unpack(head)
    if theirs != (kind, part_bytes):
        raise GroupFailed(f"member {member} is in collective {theirs}, this one in {(kind, part_bytes)}")
    yield from incoming
