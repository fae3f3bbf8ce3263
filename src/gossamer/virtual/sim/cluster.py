"""The virtual cluster: any number of workers in one process, real gradients, simulated time.

It drives each worker's generators, answers the effects they yield, and keeps time by an event queue. Everything that
happens is determined by the seed. Vectors are rows of matrices whose arithmetic is done later, in batches (``rows``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gossamer import memory
from gossamer.effects import Gather, Mean, Pair, Start, Swap, Ticket, Update, Wait, WaitSteps
from gossamer.errors import InputError
from gossamer.hardware import HardwareConfig, parse_ranked
from gossamer.methods import Method
from gossamer.recording import Recorder
from gossamer.seeds import stream
from gossamer.topology import Topology
from gossamer.virtual.compute.blocks import mean, spread
from gossamer.virtual.compute.evaluator import Evaluator
from gossamer.virtual.compute.losses import Diverged, Losses
from gossamer.virtual.compute.optimizers import MakeOptimizer, PerWorkerOptimizers, WorkerOptimizers, batched
from gossamer.virtual.compute.rows import Row
from gossamer.virtual.compute.tape import Batch, Matrix, Tape
from gossamer.virtual.sim.clock import Clock, HardwareClock, IdealClock
from gossamer.virtual.sim.event_queue import GRADIENT_BEGIN, GRADIENT_END, MESSAGE, OBSERVE, EventQueue
from gossamer.virtual.sim.exchanges import SimulatedExchanges
from gossamer.virtual.sim.pairing import PoissonPairing, ReadyPairing
from gossamer.virtual.sim.virtual_worker import Coroutine, VirtualWorker


class Cluster:
    """Workers that train together in simulated time."""

    def __init__(
        self,
        *,
        evaluator: Evaluator,
        method: Method,
        topology: Topology,
        make_optimizer: MakeOptimizer,
        schedule: Callable[[int], float],
        clock: str,
        hardware: HardwareConfig,
        seed: int,
        start: list[Tensor] | None = None,
        recorder: Recorder | None = None,
        make_clock: Callable[[EventQueue], Clock] | None = None,
    ) -> None:
        """``make_clock``: another clock in the place of the hardware's."""
        self.evaluator, self.method, self.topology, self.seed = evaluator, method, topology, seed
        self.num_workers = topology.workers
        self.recorder = recorder
        self.queue = EventQueue()
        self.advance = self.queue.run_next
        """Lets the next thing happen; False when nothing can happen any more."""
        if make_clock is None:
            make_clock = partial(HardwareClock, hardware, self.num_workers)
        self.clock: Clock = IdealClock(method.lockstep) if clock == "ideal" else make_clock(self.queue)
        self.tape = Tape(self.num_workers, evaluator.flat.dtype, evaluator.device)
        self.parameters = self.tape.matrix(evaluator.flat.size)
        self.gradients = self.tape.matrix(evaluator.flat.size)
        if evaluator.device.type == "cpu":
            memory.keep_freed(self.parameters.data[0].nbytes)
        self._named: dict[str, Matrix] = {}
        named = dict(evaluator.model.named_parameters())
        self.template = make_optimizer([named[part.name] for part in evaluator.flat.parts])
        """Only its settings are used."""
        base = self.template.param_groups[0]["lr"]
        self.lr = cache(lambda step: base * schedule(step))
        """Step number → learning rate."""
        method.check_optimizer(self.template)
        self.updates: WorkerOptimizers = batched(self.template, self.parameters, self.gradients) or PerWorkerOptimizers(
            make_optimizer, evaluator.flat, self.parameters, self.gradients
        )
        self.tape.run_updates = self.updates.apply
        self.tape.run_gradients = self._run_gradients
        self.losses = Losses()

        common = evaluator.start(self.parameters.data[0])
        for rank in range(self.num_workers):
            self.parameters.data[rank].copy_(common if start is None else start[rank])
        self.workers = [VirtualWorker(self, rank) for rank in range(self.num_workers)]
        self.exchanges = SimulatedExchanges(self.workers, self.queue, self.clock, self.tape, recorder, self._merge)
        self.pairing = (
            PoissonPairing(topology, self.queue, self._meet, stream(seed, "edges"))
            if clock == "ideal"
            else ReadyPairing(topology, self.queue, self._meet)
        )
        self.waiting: dict[Ticket, list[Coroutine]] = {}
        self.joining: list[tuple[VirtualWorker, VirtualWorker]] = []
        """Workers that join as soon as their peer has made its step."""
        self.total_steps = 0
        self.look_at = math.inf
        """How many steps are to be made until somebody looks, and no gradient may have begun after the last of them."""
        self.events: list[str] = []
        """What happened to the workers, for the person who watches."""
        self._ending = self._look = False
        self._has_gradients = evaluator.task.gradients
        self._plain_step = type(method).step is Method.step
        """A step of the method is one of the optimizer, and nothing else: nobody needs to ask for it."""
        self._schedule_life(hardware)

    def say(self, events: str) -> None:
        """Something happened that the person who watches should know."""
        self.events.append(events)
        if self.recorder is not None:
            self.recorder.add_event(self.queue.now, events)

    # Life of workers

    def _schedule_life(self, hardware: HardwareConfig) -> None:
        fails = parse_ranked(hardware.fail, "@", "--fail", self.num_workers)
        joins = parse_ranked(hardware.join, "@", "--join", self.num_workers)
        for rank, time in joins:
            if all(failed != rank or when > time for failed, when in fails):
                self.workers[rank].alive = False
                if self.recorder is not None:
                    self.recorder.left(rank, 0.0)
        for rank, time in fails:
            self.queue.schedule(time, MESSAGE, self._fail, rank)
        for rank, time in joins:
            self.queue.schedule(time, MESSAGE, self._join, rank)
        if not any(worker.alive for worker in self.workers):
            raise InputError("--join lets every worker come later: expected at least one that is there from the start")
        for worker in self.workers:
            if worker.alive:
                self._live(worker)

    def _live(self, worker: VirtualWorker) -> None:
        worker.born = self.queue.now
        if self.recorder is not None:
            self.recorder.joined(worker.rank, worker.born)
        self._run(worker, "background", self.method.background(worker))
        self._next_gradient(worker)

    def _next_gradient(self, worker: VirtualWorker) -> None:
        worker.turn += 1
        self.queue.schedule(self.queue.now, GRADIENT_BEGIN, self._begin, worker, worker.turn)

    def _fail(self, now: float, rank: int) -> None:
        worker = self.workers[rank]
        if not worker.alive:
            return
        worker.alive = False
        worker.turn += 1
        worker.lived += now - worker.born
        self.say(f"worker {rank} gone at {now:g}; going on with {sum(w.alive for w in self.workers)}")
        if self.recorder is not None:
            self.recorder.left(rank, now)
        for coroutine in worker.coroutines:
            coroutine.close()
        worker.coroutines.clear()
        worker.sleeping.clear()
        worker.tickets.clear()
        if worker.idle_since is not None:
            worker.idle_time += now - worker.idle_since
            worker.idle_since = None
        self.pairing.forget(rank)
        orphans = [joiner for joiner, peer in self.joining if peer is worker]
        self.joining = [pair for pair in self.joining if pair[1] is not worker]
        for joiner in orphans:
            self._join(now, joiner.rank)
        self.exchanges.meetings.changed(left=rank)
        for coroutine in self.exchanges.forget(rank):
            self._resume(coroutine, None)

    def _join(self, now: float, rank: int) -> None:
        worker = self.workers[rank]
        alive = [other for other in self.workers if other.alive]
        if worker.alive or not alive:
            return
        # Between two steps a worker is all there: what it takes part in is over or has not begun.
        near = [self.workers[other] for other in self.topology.neighbours(rank) if self.workers[other].alive]
        peer = (near or alive)[0]
        if peer.idle_since is None:
            self._take_over(worker, peer)
        else:
            self.joining.append((worker, peer))

    def _take_over(self, worker: VirtualWorker, peer: VirtualWorker) -> None:
        """``worker`` joins with what ``peer`` has."""
        worker.x.copy_(peer.x)
        worker.scalars = {name: peer.scalars[name] for name in self.method.shared if name in peer.scalars}
        for row in worker.vectors.values():
            row.mul_(0.0)
        for name in self.method.shared:
            if name in peer.vectors:
                worker.vector(name, len(peer.vectors[name])).copy_(peer.vectors[name])
        worker.tickets = {name: ticket for name, ticket in peer.tickets.items() if name in self.method.shared}
        worker.contributed = dict(peer.contributed)
        worker.step = peer.step
        worker.alive = True
        self.tape.flush()
        self.evaluator.buffers[worker.rank].copy_(self.evaluator.buffers[peer.rank])
        if self.method.same_updates:
            self.updates.take_over(worker.rank, peer.rank)
        else:
            self.updates.reset(worker.rank)
        self.exchanges.meetings.changed()
        self.say(f"worker {worker.rank} joined at {self.queue.now:g} with the weights of worker {peer.rank}")
        self._live(worker)

    # Gradients and steps

    def _begin(self, now: float, worker: VirtualWorker, turn: int) -> None:
        """Worker ``worker`` starts its next gradient."""
        if not worker.alive or worker.turn != turn or self._ending:
            return
        took = next(worker.gradient_times)
        if not self.clock.instantaneous:
            self._take_gradient(worker, now + took)
        self.queue.schedule(now + took, GRADIENT_END, self._end, worker, turn, took)

    def _take_gradient(self, worker: VirtualWorker, time: float) -> None:
        """Let the worker's gradient be that at its parameters now."""
        if self._has_gradients:
            self.method.eval_point(worker, worker.gradient)
            self.tape.gradient(worker.gradient, worker.batches)
            self.losses.times += (worker.rank, worker.batches, time)
        worker.batches += 1

    def _end(self, now: float, worker: VirtualWorker, turn: int, took: float) -> None:
        """The gradient is there: the method's step."""
        if not worker.alive or worker.turn != turn or self._ending:
            return
        worker.compute_time += took
        worker.computed_in = took
        if self.clock.instantaneous:
            self._take_gradient(worker, now)
        worker.idle_since = now
        if self._plain_step:
            self._update(worker)
            self._stepped(worker)
        else:
            self._run(worker, "step", self.method.step(worker))

    def _update(self, worker: VirtualWorker) -> None:
        """The optimizer's step."""
        if self._has_gradients:
            self.tape.update(worker.x, worker.gradient, self.lr(worker.step))

    def _stepped(self, worker: VirtualWorker) -> None:
        """The method's step is over."""
        now = self.queue.now
        if worker.idle_since is not None:
            computed, worker.idle_since = worker.idle_since, None
            worker.idle_time += now - computed
            if self.recorder is not None:
                self.recorder.stepped(worker.rank, computed - worker.computed_in, computed, now)
                if now > computed:
                    self.recorder.waited(worker.rank, computed, now)
        worker.step += 1
        worker.steps_done += 1
        self.total_steps += 1
        if worker.sleeping:
            due = [coroutine for step, coroutine in worker.sleeping if step <= worker.step]
            worker.sleeping = [pair for pair in worker.sleeping if pair[0] > worker.step]
            for coroutine in due:
                self._resume(coroutine, None)
        if self.joining:
            for joiner, peer in self.joining:
                if peer is worker and not joiner.alive:
                    self._take_over(joiner, peer)
            self.joining = [pair for pair in self.joining if pair[1] is not worker]
        if self._plain_step and self.total_steps < self.look_at and self.queue.settled(OBSERVE):
            # The next thing to happen, so it may happen at once.
            worker.turn += 1
            self._begin(now, worker, worker.turn)
        else:
            self._next_gradient(worker)

    def _run_gradients(self, batch: Batch) -> None:
        self.losses.add(batch.rows, batch.jobs, self.evaluator.gradients(batch.target.data, batch.rows, batch.jobs))

    def take_losses(self) -> float | None:
        """The mean training loss since this was last asked; raises ``Diverged`` if one was not finite."""
        self.tape.flush()
        return self.losses.take()

    # Effects

    def _run(self, worker: VirtualWorker, name: str, generator: Any) -> None:
        coroutine = Coroutine(worker, name, generator)
        worker.coroutines.append(coroutine)
        self._resume(coroutine, None)

    def _resume(self, coroutine: Coroutine, answer: Any) -> None:
        """Drive a generator until it has to wait, or ends."""
        if coroutine.over:
            return
        worker, send = coroutine.worker, coroutine.generator.send
        while True:
            try:
                effect = send(answer)
            except StopIteration:
                coroutine.over = True
                worker.coroutines.remove(coroutine)
                if coroutine.name == "step":
                    self._stepped(worker)
                return
            answer = None
            if isinstance(effect, Swap):
                if self.workers[effect.peer].alive:
                    self.exchanges.swap(coroutine, effect)
                else:
                    self.queue.schedule(self.queue.now, MESSAGE, lambda now: self._resume(coroutine, None))
                return
            if isinstance(effect, Pair):
                self.pairing.ask(self.queue.now, coroutine, effect.rate)
                return
            if isinstance(effect, Update):
                self._update(worker)
            elif isinstance(effect, (Mean, Gather)):
                self.exchanges.meetings.come(worker, effect, partial(self._merge, coroutine, worker.step))
                return
            elif isinstance(effect, WaitSteps):
                if effect.count > 0:
                    worker.sleeping.append((worker.step + effect.count, coroutine))
                    return
            elif isinstance(effect, Start):
                answer = ticket = Ticket(effect.effect, since_step=worker.step)
                self.exchanges.meetings.come(worker, effect.effect, partial(self._fulfil, ticket))
            elif isinstance(effect, Wait):
                if not effect.ticket.done:
                    self.waiting.setdefault(effect.ticket, []).append(coroutine)
                    return
                answer = effect.ticket.answer
                if self.recorder is not None:
                    self._record_merge(self.recorder, worker, effect.ticket.since_step)
            else:
                raise TypeError(f"{self.method.name} yielded {effect!r}, which is not an effect")

    def _fulfil(self, ticket: Ticket, answer: Any) -> None:
        ticket.done, ticket.answer = True, answer
        for coroutine in self.waiting.pop(ticket, ()):
            self._merge(coroutine, ticket.since_step, answer)

    def _merge(self, coroutine: Coroutine, since_step: int, answer: Any) -> None:
        """Give the method what it waited for, since it had made ``since_step`` steps."""
        if not coroutine.over:
            if self.recorder is not None:
                self._record_merge(self.recorder, coroutine.worker, since_step)
            self._resume(coroutine, answer)

    def _record_merge(self, recorder: Recorder, worker: VirtualWorker, since_step: int) -> None:
        now = self.queue.now
        recorder.merged(worker.rank, now, now, worker.step - since_step)

    def _meet(self, first: Coroutine, second: Coroutine) -> None:
        """Two neighbours that are ready exchange."""
        a, b = first.worker.rank, second.worker.rank
        self._resume(first, b)
        self._resume(second, a)

    # What workers and observers see

    def vector(self, name: str, size: int | None, rank: int) -> Row:
        """The row of the method's vectors called ``name``."""
        if name not in self._named:
            self._named[name] = self.tape.matrix(self.evaluator.flat.size if size is None else size)
        return Row(self.tape, self._named[name].slots[rank])

    def optimizer_setting(self, name: str, worker: VirtualWorker) -> Any:
        """A hyper-parameter of the worker's optimizer now."""
        if name == "lr":
            return self.lr(worker.step)
        return self.template.param_groups[0][name]

    def alive(self) -> list[int]:
        return [worker.rank for worker in self.workers if worker.alive]

    def observed(self) -> list[int]:
        """The workers whose models count: those alive, or, when none is left, what all of them had."""
        return self.alive() or list(range(self.num_workers))

    def consensus(self) -> float:
        """sqrt(mean_i ‖x_i − x̄‖²) over the workers alive."""
        return spread(self.rows(), self.observed())

    def divergence(self) -> Diverged:
        """What to say about the first worker whose parameters are not finite now."""
        rows = self.rows()
        bad = [worker for worker in self.workers if not bool(torch.isfinite(rows[worker.rank]).all())]
        return Diverged(self.queue.now, bad[0].rank, bad[0].steps_done)

    def rows(self) -> Tensor:
        """All workers' parameters, one row each."""
        self.tape.flush()
        return self.parameters.data

    def mean_model(self) -> Tensor:
        """The mean of the parameters of the workers alive."""
        return mean(self.rows(), self.observed())

    def utilization(self) -> float:
        """The share of their lives that workers did not spend waiting."""
        now = self.queue.now
        idle = sum(w.idle_time + (now - w.idle_since if w.idle_since is not None else 0.0) for w in self.workers)
        lived = sum(w.lived + (now - w.born if w.alive else 0.0) for w in self.workers)
        return 1.0 - idle / lived if lived else 1.0

    def mean_buffers(self) -> Tensor:
        """The mean of the buffers of the workers alive."""
        return self.evaluator.buffers[self.observed()].mean(0)

    # Running

    def run_until(self, time: float) -> None:
        """Let everything happen up to and at ``time``."""
        self.queue.schedule(time, OBSERVE, self._looked)
        self._look = False
        while not self._look:
            self.queue.run_next()

    def _looked(self, now: float) -> None:
        self._look = True

    def finish(self) -> None:
        """End training: what is under way is applied, background parts stop."""
        self._ending = True
        self.pairing.stop()
        for worker in self.workers:
            for coroutine in list(worker.coroutines):
                coroutine.close()
            worker.coroutines.clear()
            worker.sleeping.clear()
        for worker in self.workers:
            if worker.alive:
                self._run(worker, "finish", self.method.finish(worker))
        while any(worker.coroutines for worker in self.workers):
            if not self._settle():
                break

    def _settle(self) -> bool:
        while any(worker.coroutines for worker in self.workers) and self.queue.run_next():
            pass
        return any(worker.coroutines for worker in self.workers) and self.exchanges.meetings.close()
