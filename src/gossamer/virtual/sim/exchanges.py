"""What workers exchange: vectors in pairs, means and gatherings of many. Who sends how much, and when it is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gossamer.effects import Gather, Mean, Swap
from gossamer.recording import Recorder
from gossamer.virtual.compute.rows import dense
from gossamer.virtual.compute.tape import Tape
from gossamer.virtual.sim.clock import Clock, OnDone
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue
from gossamer.virtual.sim.rendezvous import Rendezvous, RendezvousTable
from gossamer.virtual.sim.virtual_worker import Coroutine, VirtualWorker

Merge = Callable[[Coroutine, int, Any], None]
"""``merge(coroutine, since_step, answer)`` gives a method what it waited for, since it had made so many steps."""


class SimulatedExchanges:
    """The exchanges of all workers."""

    def __init__(
        self,
        workers: list[VirtualWorker],
        queue: EventQueue,
        clock: Clock,
        tape: Tape,
        recorder: Recorder | None,
        merge: Merge,
    ) -> None:
        self.queue, self.clock, self.tape, self.recorder, self.merge = queue, clock, tape, recorder, merge
        self.meetings = RendezvousTable(workers, self._hold)
        self.count = 0
        """How many there were; one of many workers counts once."""
        self._swaps: dict[tuple[int, int], tuple[Coroutine, Swap, int]] = {}
        """Who wants to swap with whom: its coroutine, what it sends, and its step then."""

    def forget(self, rank: int) -> list[Coroutine]:
        """A worker died; returns who waits for its vector."""
        involved = {pair: coroutine for pair, (coroutine, _, _) in self._swaps.items() if rank in pair}
        for pair in involved:
            del self._swaps[pair]
        return [coroutine for (waiting, _), coroutine in involved.items() if waiting != rank]

    def swap(self, coroutine: Coroutine, swap: Swap) -> None:
        """A worker sends its vector, and waits for that of its peer, who is alive."""
        rank, peer = coroutine.worker.rank, swap.peer
        other = self._swaps.get((peer, rank))
        own = self._swaps[rank, peer] = (coroutine, swap, coroutine.worker.step)
        if other is None:
            return
        size, began = swap.vector.nbytes, self.queue.now
        coroutine.worker.bytes_sent += size
        other[0].worker.bytes_sent += size
        self.clock.swap(began, rank, peer, size, partial(self._swapped, first=other, second=own, began=began))

    def _swapped(
        self, now: float, first: tuple[Coroutine, Swap, int], second: tuple[Coroutine, Swap, int], began: float
    ) -> None:
        (one, sent_one, step_one), (two, sent_two, step_two) = first, second
        a, b = one.worker.rank, two.worker.rank
        if self._swaps.get((a, b)) is not first or self._swaps.get((b, a)) is not second:
            return  # one of them died meanwhile
        del self._swaps[a, b], self._swaps[b, a]
        one.worker.exchanges += 1
        two.worker.exchanges += 1
        self.count += 1
        if self.recorder is not None:
            self.recorder.exchanged((a, b), began, now, sent_one.vector.nbytes)
        self.merge(one, step_one, sent_two.vector)
        self.merge(two, step_two, sent_one.vector)

    def _hold(self, meeting: Rendezvous) -> None:
        """Everybody expected has come: do what they came for."""
        came = [meeting.came[rank] for rank in sorted(meeting.came)]
        members = tuple(worker.rank for worker, _, _ in came)
        answer: Any
        if isinstance(came[0][1], Mean):
            vectors = [effect.vector for _, effect, _ in came if isinstance(effect, Mean)]
            answer, transfer = self.tape.mean(vectors), self.clock.mean
            size, share = vectors[0].nbytes, 2 * (len(members) - 1) / len(members)
        else:
            answer = [tuple(map(dense, effect.tensors)) for _, effect, _ in came if isinstance(effect, Gather)]
            transfer = self.clock.gather
            size, share = sum(tensor.nbytes for tensor in answer[0]), len(members) - 1
        if len(members) > 1:
            for worker, _, _ in came:
                worker.bytes_sent += round(share * size)
                worker.exchanges += 1
            self.count += 1
            done = partial(self._held, came=came, answer=answer)
            if self.recorder is not None:
                done = partial(self._told, done, members, self.queue.now, round(share * size))
            transfer(self.queue.now, members, size, done)
        else:
            self._held(self.queue.now, came, answer)

    def _held(self, now: float, came: list[Any], answer: Any) -> None:
        self.queue.schedule(now, MESSAGE, self._answer, came, answer)

    def _told(self, done: OnDone, members: tuple[int, ...], began: float, sent_bytes: int, now: float) -> None:
        assert self.recorder is not None
        self.recorder.exchanged(members, began, now, sent_bytes)
        done(now)

    def _answer(self, now: float, came: list[Any], answer: Any) -> None:
        for worker, _, give in came:
            if worker.alive:
                give(answer)
