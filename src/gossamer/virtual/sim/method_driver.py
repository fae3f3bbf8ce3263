"""Drives the generators of all workers' methods and answers the effects that they yield."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gossamer.effects import Gather, Mean, MethodGenerator, Pair, Start, Swap, Ticket, Update, Wait, WaitSteps
from gossamer.recording import Recorder
from gossamer.virtual.compute.tape import Tape
from gossamer.virtual.sim.clock import Clock
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue
from gossamer.virtual.sim.exchanges import SimulatedExchanges
from gossamer.virtual.sim.pairing import PoissonPairing, ReadyPairing
from gossamer.virtual.sim.virtual_worker import Coroutine, VirtualWorker

OnWorker = Callable[[VirtualWorker], None]


class MethodDriver:
    """Runs coroutines until they wait, and resumes them when the answer arrives."""

    def __init__(
        self,
        workers: list[VirtualWorker],
        queue: EventQueue,
        clock: Clock,
        tape: Tape,
        recorder: Recorder | None,
        edge_rng: np.random.Generator | None,
        update: OnWorker,
        on_step_end: OnWorker,
    ) -> None:
        """``edge_rng``: for the edges' Poisson processes of the ideal clock; None on the hardware clock.

        ``update(worker)`` takes an optimizer step, ``on_step_end(worker)`` is called when a method's step is over.
        """
        self.workers, self.queue, self.recorder = workers, queue, recorder
        self.update, self.on_step_end = update, on_step_end
        self.exchanges = SimulatedExchanges(workers, queue, clock, tape, recorder, self._deliver)
        topology = workers[0].topology
        self.pairing = (
            ReadyPairing(topology, queue, self._on_pair)
            if edge_rng is None
            else PoissonPairing(topology, queue, self._on_pair, edge_rng)
        )
        self._waiting: dict[Ticket, list[Coroutine]] = {}

    def run(self, worker: VirtualWorker, name: str, generator: MethodGenerator) -> None:
        coroutine = Coroutine(worker, name, generator)
        worker.coroutines.append(coroutine)
        self.resume(coroutine, None)

    def resume(self, coroutine: Coroutine, answer: Any) -> None:
        """Run a coroutine until it waits or ends."""
        if coroutine.ended:
            return
        worker, send = coroutine.worker, coroutine.generator.send
        while True:
            try:
                effect = send(answer)
            except StopIteration:
                coroutine.ended = True
                worker.coroutines.remove(coroutine)
                if coroutine.name == "step":
                    self.on_step_end(worker)
                return
            answer = None
            if isinstance(effect, Swap):
                if self.workers[effect.peer].alive:
                    self.exchanges.swap(coroutine, effect)
                else:
                    self.queue.schedule(self.queue.now, MESSAGE, lambda now: self.resume(coroutine, None))
                return
            if isinstance(effect, Pair):
                self.pairing.request(self.queue.now, coroutine, effect.rate)
                return
            if isinstance(effect, Update):
                self.update(worker)
            elif isinstance(effect, (Mean, Gather)):
                self.exchanges.rendezvous.arrive(worker, effect, partial(self._deliver, coroutine, worker.step))
                return
            elif isinstance(effect, WaitSteps):
                if effect.count > 0:
                    worker.waiting_for_steps.append((worker.step + effect.count, coroutine))
                    return
            elif isinstance(effect, Start):
                answer = ticket = Ticket(effect.effect, since_step=worker.step)
                self.exchanges.rendezvous.arrive(worker, effect.effect, partial(self._complete_ticket, ticket))
            elif isinstance(effect, Wait):
                if not effect.ticket.done:
                    self._waiting.setdefault(effect.ticket, []).append(coroutine)
                    return
                answer = effect.ticket.answer
                if self.recorder is not None:
                    self._record_merge(self.recorder, worker, effect.ticket.since_step)
            else:
                raise TypeError(f"{coroutine.name} of the method yielded {effect!r}, which is not an effect")

    def resume_waiting_for_steps(self, worker: VirtualWorker) -> None:
        """Resume the coroutines that waited for the step that ``worker`` has just made."""
        due = [coroutine for step, coroutine in worker.waiting_for_steps if step <= worker.step]
        worker.waiting_for_steps = [pair for pair in worker.waiting_for_steps if pair[0] > worker.step]
        for coroutine in due:
            self.resume(coroutine, None)

    def _complete_ticket(self, ticket: Ticket, answer: Any) -> None:
        ticket.done, ticket.answer = True, answer
        for coroutine in self._waiting.pop(ticket, ()):
            self._deliver(coroutine, ticket.since_step, answer)

    def _deliver(self, coroutine: Coroutine, since_step: int, answer: Any) -> None:
        """Resume a coroutine with the answer that it has waited for since ``since_step``."""
        if not coroutine.ended:
            if self.recorder is not None:
                self._record_merge(self.recorder, coroutine.worker, since_step)
            self.resume(coroutine, answer)

    def _record_merge(self, recorder: Recorder, worker: VirtualWorker, since_step: int) -> None:
        now = self.queue.now
        recorder.merged(worker.rank, now, now, worker.step - since_step)

    def _on_pair(self, first: Coroutine, second: Coroutine) -> None:
        a, b = first.worker.rank, second.worker.rank
        self.resume(first, b)
        self.resume(second, a)

    def close(self, worker: VirtualWorker) -> None:
        for coroutine in worker.coroutines:
            coroutine.close()
        worker.coroutines.clear()
        worker.waiting_for_steps.clear()

    def remove(self, rank: int) -> None:
        """Take a worker that died out of all communication and resume those that wait for it."""
        self.exchanges.rendezvous.on_membership_change(left=rank)
        for coroutine in self.exchanges.remove(rank):
            self.resume(coroutine, None)

    def drain(self) -> None:
        """Run events until all coroutines have ended. Collectives that still miss workers then do without them."""
        while self._any_running():
            if not self.queue.run_next() and not self.exchanges.rendezvous.complete_all():
                break

    def _any_running(self) -> bool:
        return any(worker.coroutines for worker in self.workers)
