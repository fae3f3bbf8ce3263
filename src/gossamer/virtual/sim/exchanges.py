"""Simulated communication: exchanges of two workers, means and gathers of many.

Counts what every worker sends, asks the clock how long it takes, and delivers the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gossamer.effects import Gather, Mean, Swap
from gossamer.recording import Recorder
from gossamer.virtual.compute.tensor_like import dense
from gossamer.virtual.compute.tape import Tape
from gossamer.virtual.sim.clock import Clock
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue
from gossamer.virtual.sim.rendezvous import OnAnswer, Rendezvous, RendezvousTable
from gossamer.virtual.sim.virtual_worker import Coroutine, VirtualWorker

Deliver = Callable[[Coroutine, int, Any], None]
"""``deliver(coroutine, since_step, answer)`` resumes a coroutine that has waited for ``answer`` since that step."""

PendingSwap = tuple[Coroutine, Swap, int]
"""The coroutine that waits, what it sends, and the worker's step when it began to wait."""

Contribution = tuple[VirtualWorker, Mean | Gather, OnAnswer]


class SimulatedExchanges:
    def __init__(
        self,
        workers: list[VirtualWorker],
        queue: EventQueue,
        clock: Clock,
        tape: Tape,
        recorder: Recorder | None,
        deliver: Deliver,
    ) -> None:
        self.queue, self.clock, self.tape, self.recorder, self.deliver = queue, clock, tape, recorder, deliver
        self.rendezvous = RendezvousTable(workers, self._run_collective)
        self.count = 0
        """Exchanges so far; a collective of many workers counts once."""
        self._swaps: dict[tuple[int, int], PendingSwap] = {}
        """By the rank of the sender and of its peer."""

    def remove(self, rank: int) -> list[Coroutine]:
        """Drop the swaps of a worker that died. Return the coroutines that wait for its vector."""
        involved = {pair: coroutine for pair, (coroutine, _, _) in self._swaps.items() if rank in pair}
        for pair in involved:
            del self._swaps[pair]
        return [coroutine for (sender, _), coroutine in involved.items() if sender != rank]

    def swap(self, coroutine: Coroutine, swap: Swap) -> None:
        """Send the vector of a worker to its peer, which is alive, once the peer sends its own."""
        rank, peer = coroutine.worker.rank, swap.peer
        other = self._swaps.get((peer, rank))
        own = self._swaps[rank, peer] = (coroutine, swap, coroutine.worker.step)
        if other is None:
            return
        size, began = swap.vector.nbytes, self.queue.now
        coroutine.worker.bytes_sent += size
        other[0].worker.bytes_sent += size
        self.clock.swap(began, rank, peer, size, partial(self._finish_swap, first=other, second=own, began=began))

    def _finish_swap(self, now: float, first: PendingSwap, second: PendingSwap, began: float) -> None:
        (one, sent_one, step_one), (two, sent_two, step_two) = first, second
        a, b = one.worker.rank, two.worker.rank
        if self._swaps.get((a, b)) is not first or self._swaps.get((b, a)) is not second:
            return  # a worker died in the meantime
        del self._swaps[a, b], self._swaps[b, a]
        one.worker.exchanges += 1
        two.worker.exchanges += 1
        self.count += 1
        if self.recorder is not None:
            self.recorder.exchanged((a, b), began, now, sent_one.vector.nbytes)
        self.deliver(one, step_one, sent_two.vector)
        self.deliver(two, step_two, sent_one.vector)

    def _run_collective(self, rendezvous: Rendezvous) -> None:
        """Compute the mean or the gather of those who arrived, and answer when the network is done."""
        contributions = [rendezvous.arrived[rank] for rank in sorted(rendezvous.arrived)]
        members = tuple(worker.rank for worker, _, _ in contributions)
        answer: Any
        if isinstance(contributions[0][1], Mean):
            vectors = [effect.vector for _, effect, _ in contributions if isinstance(effect, Mean)]
            answer, transfer = self.tape.mean(vectors), self.clock.mean
            size, share = vectors[0].nbytes, 2 * (len(members) - 1) / len(members)
        else:
            answer = [tuple(map(dense, effect.tensors)) for _, effect, _ in contributions if isinstance(effect, Gather)]
            transfer = self.clock.gather
            size, share = sum(tensor.nbytes for tensor in answer[0]), len(members) - 1
        began = self.queue.now
        if len(members) == 1:
            self.queue.schedule(began, MESSAGE, self._answer, contributions, answer)
            return
        sent_bytes = round(share * size)
        for worker, _, _ in contributions:
            worker.bytes_sent += sent_bytes
            worker.exchanges += 1
        self.count += 1

        def done(now: float) -> None:
            if self.recorder is not None:
                self.recorder.exchanged(members, began, now, sent_bytes)
            self.queue.schedule(now, MESSAGE, self._answer, contributions, answer)

        transfer(began, members, size, done)

    @staticmethod
    def _answer(now: float, contributions: list[Contribution], answer: Any) -> None:
        for worker, _, on_answer in contributions:
            if worker.alive:
                on_answer(answer)
