"""Simulated communication: exchanges of two workers, and collectives of many.

Counts what every worker sends, asks the clock how long it takes, and delivers the answers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gossamer.effects import Gather, Mean, Shift, Swap
from gossamer.errors import MethodError
from gossamer.recording import Recorder
from gossamer.virtual.comm.encoding import Encoding
from gossamer.virtual.comm.messages import SCALAR_BYTES, Collective, check_content, check_fits, size_bytes
from gossamer.virtual.comm.rendezvous import OnAnswer, Rendezvous, RendezvousTable
from gossamer.virtual.comm.shifts import ShiftRound
from gossamer.virtual.compute.matrix import VectorPool
from gossamer.virtual.compute.rows import Temporary, copy_of
from gossamer.virtual.compute.tape import Tape
from gossamer.virtual.compute.tensor_like import dense
from gossamer.virtual.sim.clock import Clock
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue
from gossamer.virtual.sim.virtual_worker import VirtualWorker

PendingSwap = tuple[VirtualWorker, Swap, OnAnswer]
"""A worker that waits for its peer, what it sends, and what is called with the answer."""

Contribution = tuple[VirtualWorker, Collective, OnAnswer]


class SimulatedExchanges:
    def __init__(
        self,
        workers: list[VirtualWorker],
        queue: EventQueue,
        clock: Clock,
        tape: Tape,
        recorder: Recorder | None,
        method: str,
        encoding: Encoding | None,
    ) -> None:
        """``method``: the name of the method, for errors. ``encoding``: how models travel; None: as they are."""
        self.encoding = encoding
        self.queue, self.clock, self.tape, self.recorder, self.method = queue, clock, tape, recorder, method
        self.rendezvous = RendezvousTable(workers, self._make_rendezvous, method)
        self.count = 0
        """Exchanges so far; a collective of many workers counts once."""
        self._swaps: dict[tuple[int, int], PendingSwap] = {}
        """By the rank of the sender and of its peer."""
        self._swap_length: int | None = None
        """Of all swaps of the run."""
        self._swap_pool: VectorPool | None = None
        """The pool of swaps whose contents are known to fit, if they are snapshots without scalars."""

    # Exchanges of two workers

    def swap(self, worker: VirtualWorker, swap: Swap, on_answer: OnAnswer) -> None:
        """Send the vector of a worker to its peer, which is alive, once the peer sends its own."""
        rank, peer = worker.rank, swap.peer
        other = self._swaps.get((peer, rank))
        own = self._swaps[rank, peer] = (worker, swap, on_answer)
        if other is None:
            return
        their_worker, theirs, _ = other
        mine: Any = swap.vector
        pool = mine.slot.pool if type(mine) is Temporary else None
        if pool is None or pool is not self._swap_pool or _pool(theirs.vector) is not pool or swap.scalars:
            self._check_swap(worker, swap, their_worker, theirs)
        size = mine.nbytes if self.encoding is None else self.encoding.swap_bytes(mine)
        size += SCALAR_BYTES * len(swap.scalars)
        worker.bytes_sent += size
        their_worker.bytes_sent += size
        began = self.queue.now
        self.clock.swap(began, rank, peer, size, partial(self._finish_swap, other, own, began, size))

    def _check_swap(self, worker: VirtualWorker, swap: Swap, their_worker: VirtualWorker, theirs: Swap) -> None:
        """Raise ``MethodError`` if the contents of two swaps do not fit, or if they are not as long as earlier ones."""
        for one, sent in ((worker, swap), (their_worker, theirs)):
            check_content(self.method, "background", one.rank, sent, self.tape.device)
        check_fits(self.method, worker.rank, swap, their_worker.rank, theirs)
        length = len(swap.vector)
        if self._swap_length not in (None, length):
            raise MethodError(
                f"method {self.method}: workers {worker.rank} and {their_worker.rank} swap {length} numbers, earlier "
                f"swaps had {self._swap_length}: all swaps of a run have one length"
            )
        self._swap_length, self._swap_pool = length, None if swap.scalars else _pool(swap.vector)

    def _finish_swap(self, first: PendingSwap, second: PendingSwap, began: float, size: int, now: float) -> None:
        (one, sent_one, answer_one), (two, sent_two, answer_two) = first, second
        a, b = one.rank, two.rank
        if self._swaps.get((a, b)) is not first or self._swaps.get((b, a)) is not second:
            return  # a worker died in the meantime
        del self._swaps[a, b], self._swaps[b, a]
        one.exchanges += 1
        two.exchanges += 1
        self.count += 1
        if self.recorder is not None:
            self.recorder.exchanged((a, b), began, now, size)
        # Both before the first answer: a worker that has its answer may write to what it sent.
        if self.encoding is None:
            to_one, to_two = copy_of(sent_two.vector), copy_of(sent_one.vector)
        else:
            to_one, to_two = self.encoding.swap(a, sent_one.vector, b, sent_two.vector)
        if sent_one.scalars:
            to_one, to_two = (to_one, tuple(sent_two.scalars)), (to_two, tuple(sent_one.scalars))
        answer_one(to_one)
        answer_two(to_two)

    def remove(self, rank: int) -> list[OnAnswer]:
        """Drop the swaps of a worker that died. Return what is to be called for those that wait for its vector."""
        involved = [pair for pair in self._swaps if rank in pair]
        dropped = [(pair, self._swaps.pop(pair)) for pair in involved]
        return [on_answer for (sender, _), (_, _, on_answer) in dropped if sender != rank]

    def take_half_swaps(self) -> list[OnAnswer]:
        """Drop the swaps whose peer has not sent. Return what is to be called for those that wait."""
        halves = [(a, b) for a, b in self._swaps if (b, a) not in self._swaps]
        return [self._swaps.pop(pair)[2] for pair in halves]

    # Collectives

    def _make_rendezvous(self, effect: Collective, members: tuple[VirtualWorker, ...], part: str) -> Rendezvous:
        if isinstance(effect, Shift):
            return ShiftRound(self, effect, members, part, self.method)
        return _Collective(self, effect, members, part)

    def run_collective(self, contributions: list[Contribution]) -> None:
        """Compute the mean or the gather of those who arrived, and answer when the network is done."""
        members = tuple(worker.rank for worker, _, _ in contributions)
        size = size_bytes(contributions[0][1])
        if isinstance(contributions[0][1], Mean):
            means = [effect for _, effect, _ in contributions if isinstance(effect, Mean)]
            answers, transfer = self._means(members, means), self.clock.mean
            share = 2 * (len(members) - 1) / len(members)
            if self.encoding is not None and len(members) > 1:
                vector = means[0].vector
                size += round(self.encoding.mean_bytes(vector, len(members)) / share) - vector.nbytes
        else:
            tensors = [effect.tensors for _, effect, _ in contributions if isinstance(effect, Gather)]
            gathered = [tuple(dense(tensor).clone() for tensor in each) for each in tensors]
            answers, transfer = [gathered] * len(members), self.clock.gather
            share = len(members) - 1
        began = self.queue.now
        if len(members) == 1:
            self.queue.schedule(began, MESSAGE, self._answer, contributions, answers)
            return
        sent_bytes = round(share * size)
        for worker, _, _ in contributions:
            worker.bytes_sent += sent_bytes
            worker.exchanges += 1
        self.count += 1

        def done(now: float) -> None:
            if self.recorder is not None:
                self.recorder.exchanged(members, began, now, sent_bytes)
            self.queue.schedule(now, MESSAGE, self._answer, contributions, answers)

        transfer(began, members, size, done)

    def _means(self, ranks: tuple[int, ...], effects: list[Mean]) -> list[Any]:
        """Return the answer of each member of a mean."""
        vectors, weights = [mean.vector for mean in effects], [mean.weight for mean in effects]
        if self.encoding is not None and len(ranks) > 1:
            means = self.encoding.mean(ranks, effects)
        else:
            is_weighted = any(weight != 1.0 for weight in weights)
            means = [self.tape.mean(vectors, weights if is_weighted else None)] * len(ranks)
        if not effects[0].scalars:
            return means
        total = sum(weights) or 1.0
        columns = zip(*(mean.scalars for mean in effects), strict=True)
        scalars = tuple(sum(w * s for w, s in zip(weights, column, strict=True)) / total for column in columns)
        return [(mean, scalars) for mean in means]

    @staticmethod
    def _answer(now: float, contributions: list[Contribution], answers: list[Any]) -> None:
        for (worker, _, on_answer), answer in zip(contributions, answers, strict=True):
            if worker.alive:
                on_answer(answer)


class _Collective(Rendezvous):
    """One round of a ``Mean`` or a ``Gather``: all members wait for all."""

    def __init__(
        self, exchanges: SimulatedExchanges, effect: Collective, members: tuple[VirtualWorker, ...], part: str
    ) -> None:
        super().__init__(effect, members, part, exchanges.method)
        self.exchanges = exchanges

    def complete(self) -> None:
        self.exchanges.run_collective([self.arrived[rank] for rank in sorted(self.arrived)])


def _pool(vector: Any) -> VectorPool | None:
    return vector.slot.pool if type(vector) is Temporary else None
