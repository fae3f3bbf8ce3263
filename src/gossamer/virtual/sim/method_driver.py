"""Drives the generators of all workers' methods and answers the effects that they yield."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gossamer.effects import MethodGenerator, Pair, Start, Swap, Ticket, Update, Wait, WaitSteps
from gossamer.errors import MethodError
from gossamer.methods import Method
from gossamer.methods.loading.method_contract import PARTS, check_effect, check_generator, declared
from gossamer.recording import Recorder
from gossamer.virtual.comm.deadlocks import DeadlockDetector
from gossamer.virtual.comm.encoding import Encoding
from gossamer.virtual.comm.exchanges import SimulatedExchanges
from gossamer.virtual.comm.messages import Collective, check_content
from gossamer.virtual.comm.pairing import PoissonPairing, ReadyPairing
from gossamer.virtual.comm.rendezvous import OnAnswer, Rendezvous
from gossamer.virtual.compute.tape import Tape
from gossamer.virtual.sim.clock import Clock
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue
from gossamer.virtual.sim.virtual_worker import Coroutine, VirtualWorker

OnWorker = Callable[[VirtualWorker], None]


class MethodDriver:
    """Runs coroutines until they wait, and resumes them when the answer arrives."""

    def __init__(
        self,
        method: Method,
        workers: list[VirtualWorker],
        queue: EventQueue,
        clock: Clock,
        tape: Tape,
        recorder: Recorder | None,
        edge_rng: np.random.Generator | None,
        encoding: Encoding | None,
        update: OnWorker,
        on_step_end: OnWorker,
    ) -> None:
        """``edge_rng``: for the edges' Poisson processes of the ideal clock; None on the hardware clock.

        ``encoding``: how models travel; None: as they are.
        ``update(worker)`` takes an optimizer step, ``on_step_end(worker)`` is called when a method's step is over.
        """
        self.method, self.workers, self.queue, self.tape, self.recorder = method, workers, queue, tape, recorder
        self.update, self.on_step_end = update, on_step_end
        self._declared = {part: declared(method, part) for part in PARTS}
        self.exchanges = SimulatedExchanges(workers, queue, clock, tape, recorder, method.name, encoding)
        self.deadlocks = DeadlockDetector(workers, method.name)
        topology = workers[0].topology
        self.pairing = (
            ReadyPairing(topology, queue, self._on_pair)
            if edge_rng is None
            else PoissonPairing(topology, queue, self._on_pair, edge_rng)
        )
        self._waiting: dict[Ticket, list[Coroutine]] = {}
        self._rendezvous: dict[Ticket, Rendezvous] = {}
        """The collectives of tickets that are not done."""

    def run(self, worker: VirtualWorker, name: str, generator: MethodGenerator) -> None:
        check_generator(self.method, name, generator)
        coroutine = Coroutine(worker, name, generator, self._declared[name])
        worker.coroutines.append(coroutine)
        self.resume(coroutine, None)

    def resume(self, coroutine: Coroutine, answer: Any) -> None:
        """Run a coroutine until it waits or ends."""
        if coroutine.ended:
            return
        worker, send, allowed = coroutine.worker, coroutine.generator.send, coroutine.declared
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
            if type(effect) not in allowed:
                check_effect(self.method, coroutine.name, effect)
            if isinstance(effect, Swap):
                self._swap(worker, effect, partial(self._deliver, coroutine, worker.step))
                return
            if isinstance(effect, Pair):
                self._pair(coroutine, effect.rate)
                return
            if isinstance(effect, Update):
                self._update(coroutine, effect)
            elif isinstance(effect, WaitSteps):
                if effect.count > 0:
                    worker.waiting_for_steps.append((worker.step + effect.count, coroutine))
                    return
            elif isinstance(effect, Start):
                answer = self._start(coroutine, effect)
            elif isinstance(effect, Wait):
                if not effect.ticket.done:
                    self._waiting.setdefault(effect.ticket, []).append(coroutine)
                    self.deadlocks.wait(coroutine, self._rendezvous.get(effect.ticket))
                    return
                answer = self._take(coroutine, effect.ticket)
            else:
                check_effect(self.method, coroutine.name, effect)
                on_answer = partial(self._deliver, coroutine, worker.step)
                self.deadlocks.wait(coroutine, self._arrive(coroutine, effect, on_answer))
                return

    # Effects

    def _update(self, coroutine: Coroutine, update: Update) -> None:
        if coroutine.has_updated:
            raise MethodError(f"step of method {self.method.name} yielded Update twice: expected at most one in a step")
        coroutine.has_updated = True
        if update.gradient is not None:
            coroutine.worker.gradient.copy_(update.gradient)
        self.update(coroutine.worker)

    def _arrive(self, coroutine: Coroutine, effect: Collective, on_answer: OnAnswer) -> Rendezvous:
        worker, part = coroutine.worker, coroutine.name
        check_content(self.method.name, part, worker.rank, effect, self.tape.device)
        return self.exchanges.rendezvous.arrive(worker, effect, on_answer, part)

    def _pair(self, coroutine: Coroutine, rate: float) -> None:
        worker = coroutine.worker
        if worker.swap_ticket is not None or worker.paired_with is not None:
            swap = worker.swap_ticket
            peer = worker.paired_with if swap is None else swap.effect.peer  # type: ignore[union-attr]
            done = "has not swapped" if swap is None else "has not waited for the Swap that it started"
            raise MethodError(
                f"background of method {self.method.name} yielded Pair on worker {worker.rank}, which {done} with "
                f"worker {peer}: each answer of Pair is for one Swap, which ends before the next Pair"
            )
        if not rate > 0.0:
            raise MethodError(
                f"background of method {self.method.name} yielded Pair(rate={rate}): expected exchanges per gradient, "
                "more than 0"
            )
        worker.lost_peer = None
        self.pairing.request(self.queue.now, coroutine, rate)

    def _swap(self, worker: VirtualWorker, swap: Swap, on_answer: OnAnswer) -> None:
        if swap.scalars:
            check_effect(self.method, "background", swap)
        if worker.paired_with == swap.peer:
            worker.paired_with = None
            self.exchanges.swap(worker, swap, on_answer)
        elif worker.lost_peer == swap.peer:
            worker.lost_peer = None
            self.queue.schedule(self.queue.now, MESSAGE, lambda now: on_answer(None))
        else:
            agreed = worker.lost_peer if worker.paired_with is None else worker.paired_with
            instead = "no Pair has been answered" if agreed is None else f"Pair answered {agreed}"
            raise MethodError(
                f"background of method {self.method.name} yielded Swap on worker {worker.rank} with worker "
                f"{swap.peer}, but {instead}: each answer of Pair is for one Swap"
            )

    def _start(self, coroutine: Coroutine, start: Start) -> Ticket:
        check_effect(self.method, coroutine.name, start)
        worker, effect = coroutine.worker, start.effect
        ticket = Ticket(effect, since_step=worker.step)
        on_answer = partial(self._complete_ticket, ticket)
        if isinstance(effect, Swap):
            self._swap(worker, effect, on_answer)
            worker.swap_ticket = ticket
        else:
            self._rendezvous[ticket] = self._arrive(coroutine, effect, on_answer)
        return ticket

    def _take(self, coroutine: Coroutine, ticket: Ticket) -> Any:
        """Return the answer of a ticket that is done."""
        worker = coroutine.worker
        if worker.swap_ticket is ticket:
            worker.swap_ticket = None
        if self.recorder is not None and ticket.answer is not None:
            self._record_merge(self.recorder, worker, ticket.since_step)
        return ticket.answer

    def resume_waiting_for_steps(self, worker: VirtualWorker) -> None:
        """Resume the coroutines that waited for the step that ``worker`` has just made."""
        due = [coroutine for step, coroutine in worker.waiting_for_steps if step <= worker.step]
        worker.waiting_for_steps = [pair for pair in worker.waiting_for_steps if pair[0] > worker.step]
        for coroutine in due:
            self.resume(coroutine, None)

    # Answers

    def _complete_ticket(self, ticket: Ticket, answer: Any) -> None:
        ticket.done, ticket.answer = True, answer
        self._rendezvous.pop(ticket, None)
        for coroutine in self._waiting.pop(ticket, ()):
            if not coroutine.ended:
                self.deadlocks.go_on(coroutine)
                self.resume(coroutine, self._take(coroutine, ticket))

    def _deliver(self, coroutine: Coroutine, since_step: int, answer: Any) -> None:
        """Resume a coroutine with the answer that it has waited for since ``since_step``."""
        if coroutine.ended:
            return
        if coroutine.waits_in is not None:
            self.deadlocks.go_on(coroutine)
        if self.recorder is not None and answer is not None:
            self._record_merge(self.recorder, coroutine.worker, since_step)
        self.resume(coroutine, answer)

    def _record_merge(self, recorder: Recorder, worker: VirtualWorker, since_step: int) -> None:
        now = self.queue.now
        recorder.merged(worker.rank, now, now, worker.step - since_step)

    def _on_pair(self, first: Coroutine, second: Coroutine) -> None:
        one, two = first.worker, second.worker
        one.paired_with, two.paired_with = two.rank, one.rank
        self.resume(first, two.rank)
        self.resume(second, one.rank)

    # Workers that leave, and the end

    def close(self, worker: VirtualWorker) -> None:
        for coroutine in worker.coroutines:
            self.deadlocks.go_on(coroutine)
            coroutine.close()
        worker.coroutines.clear()
        worker.waiting_for_steps.clear()

    def remove(self, rank: int) -> None:
        """Take a worker that died out of all communication and resume those that wait for it."""
        left = self.workers[rank]
        left.paired_with = left.lost_peer = left.swap_ticket = None
        for worker in self.workers:
            if worker.paired_with == rank:
                worker.paired_with, worker.lost_peer = None, rank
        self.deadlocks.on_membership_change()
        self.exchanges.rendezvous.on_membership_change(left=rank)
        for on_answer in self.exchanges.remove(rank):
            on_answer(None)

    def end_training(self) -> None:
        """Close the coroutines of all workers. What was started may still be waited for."""
        self.deadlocks.check()
        self.deadlocks.is_finishing = True
        self.pairing.stop()
        for worker in self.workers:
            self.close(worker)
        self.exchanges.rendezvous.end_training()

    def drain(self) -> None:
        """Run events until all coroutines have ended. What still misses workers that never come does without them."""
        while self._any_running():
            if self.queue.run_next() or self.exchanges.rendezvous.complete_left_over():
                continue
            halves = self.exchanges.take_half_swaps()
            for on_answer in halves:
                on_answer(None)
            if not halves:
                self.raise_stalled()

    def raise_stalled(self) -> None:
        """Raise ``MethodError``: nothing happens any more, and workers wait."""
        self.deadlocks.check()
        coroutines = [coroutine for worker in self.workers for coroutine in worker.coroutines]
        waiting = next(coroutine for coroutine in coroutines if coroutine.name != "background")
        raise MethodError(
            f"{waiting.name} of method {self.method.name} on worker {waiting.worker.rank} waits for a Swap that its "
            "peer does not yield: each answer of Pair is for one Swap"
        )

    def _any_running(self) -> bool:
        return any(worker.coroutines for worker in self.workers)
