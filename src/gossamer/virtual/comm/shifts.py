"""Shifts: every worker sends a vector to one worker and receives that of another, each message over its own link.

A message begins when its sender and its receiver have arrived, so a worker waits only for the two that it exchanges
with. Where one of them is gone, or goes before the message has arrived, the other's answer says so.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gossamer.effects import Shift, Shifted
from gossamer.errors import MethodError
from gossamer.virtual.comm.messages import Collective, size_bytes, text
from gossamer.virtual.comm.rendezvous import OnAnswer, Rendezvous
from gossamer.virtual.compute.rows import copy_of
from gossamer.virtual.sim.event_queue import MESSAGE
from gossamer.virtual.sim.virtual_worker import VirtualWorker

if TYPE_CHECKING:
    from gossamer.virtual.comm.exchanges import SimulatedExchanges

WAITING, SENDING, DONE = range(3)
"""States of a message."""


class _Transfer:
    """The two messages of one worker: the one that it sends, and the one that it receives."""

    def __init__(self, worker: VirtualWorker, shift: Shift, on_answer: OnAnswer) -> None:
        self.worker, self.shift, self.on_answer = worker, shift, on_answer
        self.alive_since = worker.alive_since
        self.sent = self.received = WAITING
        self.delivered = False
        self.vector: Any = None
        self.scalars: tuple[float, ...] = ()

    def is_alive(self) -> bool:
        """Whether the worker has been alive since it arrived."""
        return self.worker.alive and self.worker.alive_since == self.alive_since


class ShiftRound(Rendezvous):
    """One round of a ``Shift``."""

    def __init__(
        self, exchanges: SimulatedExchanges, effect: Shift, members: tuple[VirtualWorker, ...], part: str, method: str
    ) -> None:
        super().__init__(effect, members, part, method)
        self.exchanges, self.transfers = exchanges, dict[int, _Transfer]()
        self._is_counted = False

    def add(self, worker: VirtualWorker, effect: Collective, on_answer: OnAnswer) -> None:
        assert isinstance(effect, Shift)
        rank = worker.rank
        for peer in (effect.to, effect.source):
            if not 0 <= peer < len(self.members):
                raise MethodError(
                    f"method {self.method}: worker {rank} names worker {peer} in {text(effect)}: expected a rank from "
                    f"0 to {len(self.members) - 1}"
                )
        super().add(worker, effect, on_answer)
        self.transfers[rank] = _Transfer(worker, effect, on_answer)
        self._connect(rank, effect.to)
        if effect.source != rank or effect.to != rank:
            self._connect(effect.source, rank)

    def awaited(self, rank: int) -> list[VirtualWorker]:
        transfer = self.transfers[rank]
        ends = ((transfer.sent, transfer.shift.to), (transfer.received, transfer.shift.source))
        return [self.members[peer] for state, peer in ends if state == WAITING and self.expects(self.members[peer])]

    def remove(self, rank: int) -> None:
        super().remove(rank)
        self.transfers.pop(rank, None)
        self._give_up_on_missing()

    def complete(self) -> None:
        self._give_up_on_missing(everybody=True)

    def _give_up_on_missing(self, everybody: bool = False) -> None:
        """End the waits for workers that will not arrive; for all workers that have not, if ``everybody``."""
        for transfer in list(self.transfers.values()):
            shift = transfer.shift
            if transfer.sent == WAITING and (everybody or not self.expects(self.members[shift.to])):
                self._end(transfer, sent=True)
            if transfer.received == WAITING and (everybody or not self.expects(self.members[shift.source])):
                self._end(transfer, received=True)

    def _connect(self, source: int, to: int) -> None:
        """Send the message from ``source`` to ``to`` if both are there; end the wait if one of them will not come."""
        sender, receiver = self.transfers.get(source), self.transfers.get(to)
        if sender is not None and receiver is not None:
            self._check_ends(sender, receiver)
            if sender.sent == WAITING and receiver.received == WAITING:
                self._send(sender, receiver)
            else:  # the other one joined after this one had given it up
                self._end(sender, sent=sender.sent == WAITING)
                self._end(receiver, received=receiver.received == WAITING)
        elif sender is not None and not self.expects(self.members[to]):
            self._end(sender, sent=True)
        elif receiver is not None and not self.expects(self.members[source]):
            self._end(receiver, received=True)

    def _check_ends(self, sender: _Transfer, receiver: _Transfer) -> None:
        a, b = sender.worker.rank, receiver.worker.rank
        if sender.shift.to != b or receiver.shift.source != a:
            raise MethodError(
                f"method {self.method}: in {text(sender.shift)} worker {a} sends to worker {sender.shift.to}, worker "
                f"{b} receives from worker {receiver.shift.source}: source must be the inverse of to"
            )

    def _send(self, sender: _Transfer, receiver: _Transfer) -> None:
        sender.sent = receiver.received = SENDING
        began = self.exchanges.queue.now
        done = partial(self._arrive, sender=sender, receiver=receiver, began=began)
        if sender is receiver:
            done(began)
            return
        size = size_bytes(sender.shift)
        sender.worker.bytes_sent += size
        if not self._is_counted:
            self._is_counted = True
            self.exchanges.count += 1
        self.exchanges.clock.shift(began, sender.worker.rank, receiver.worker.rank, size, done)

    def _arrive(self, now: float, sender: _Transfer, receiver: _Transfer, began: float) -> None:
        if sender.is_alive():
            receiver.vector, receiver.scalars = copy_of(sender.shift.vector), sender.shift.scalars
        sender.delivered = receiver.is_alive()
        if sender is not receiver:
            sender.worker.exchanges += 1
            if self.exchanges.recorder is not None:
                pair = (sender.worker.rank, receiver.worker.rank)
                # The recorder counts what both members of a pair send.
                self.exchanges.recorder.exchanged(pair, began, now, size_bytes(sender.shift) // 2)
        self._end(sender, sent=True)
        self._end(receiver, received=True)

    def _end(self, transfer: _Transfer, sent: bool = False, received: bool = False) -> None:
        """Note that a message of a worker has arrived or will not; answer when both have."""
        if not (sent or received):
            return
        transfer.sent = DONE if sent else transfer.sent
        transfer.received = DONE if received else transfer.received
        if transfer.sent == transfer.received == DONE:
            queue = self.exchanges.queue
            queue.schedule(queue.now, MESSAGE, self._answer, transfer)

    @staticmethod
    def _answer(now: float, transfer: _Transfer) -> None:
        if transfer.is_alive():
            transfer.on_answer(Shifted(transfer.vector, transfer.scalars, transfer.delivered))
