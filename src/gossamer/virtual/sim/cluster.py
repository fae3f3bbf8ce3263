"""The virtual cluster: any number of workers in one process, real gradients, simulated time.

The cluster puts the parts together and runs the cycle of every worker: begin a gradient, end it, run the method's step.

==================  ====================================================================================
``event_queue``     what happens next
``clock``           how long gradients and messages take, with ``comm.network`` behind it
``virtual_worker``  what the method sees of a worker, and what the simulation keeps about it
``replicas``        the numbers of all workers; their arithmetic is recorded on a tape and executed later
``method_driver``   runs the methods' generators and answers their effects
``comm``            which workers exchange next, what travels between them, who waits for ever
``lifecycle``       workers that fail and join
==================  ====================================================================================

The seed determines everything that happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gossamer.config import Run, find_device
from gossamer.methods.loading.method_contract import check_declaration
from gossamer.recording import Recorder
from gossamer.seeds import stream
from gossamer.tasks import worker_batches
from gossamer.virtual.comm.encoding import Encoding
from gossamer.virtual.compute.comparison_cache import ComparisonCache
from gossamer.virtual.compute.evaluator import Evaluator
from gossamer.virtual.sim.clock import Clock, HardwareClock, IdealClock
from gossamer.virtual.sim.event_queue import GRADIENT_BEGIN, GRADIENT_END, OBSERVE, EventQueue
from gossamer.virtual.sim.lifecycle import Lifecycle
from gossamer.virtual.sim.method_driver import MethodDriver
from gossamer.virtual.sim.replicas import Replicas
from gossamer.virtual.sim.virtual_worker import VirtualWorker


class Cluster:
    def __init__(
        self,
        run: Run,
        recorder: Recorder | None = None,
        make_clock: Callable[[EventQueue], Clock] | None = None,
        cache: ComparisonCache | None = None,
    ) -> None:
        """Set up the workers of ``run`` before their first step.

        Args:
            make_clock: replaces the hardware clock.
            cache: of the comparison, if the run is part of one.
        """
        c, method = run.config, run.method()
        check_declaration(method)
        self.method, self.recorder, self.num_workers = method, recorder, c.workers
        self.queue = EventQueue()
        self.advance = self.queue.run_next
        self.evaluator = _make_evaluator(run, cache)
        if c.clock == "ideal":
            self.clock: Clock = IdealClock(method.lockstep)
        elif make_clock is not None:
            self.clock = make_clock(self.queue)
        else:
            size_bytes = self.evaluator.flat.size * self.evaluator.flat.dtype.itemsize
            self.clock = HardwareClock(run.hardware, c.workers, self.queue, run.replica, size_bytes)
        self.replicas = Replicas(run, self.evaluator)
        method.check_optimizer(self.replicas.template)
        self.tape = self.replicas.tape
        self.workers = [
            VirtualWorker(rank, run.topology, c.seed, self.replicas, self.clock, self.queue, recorder)
            for rank in range(c.workers)
        ]
        self.driver = MethodDriver(
            method,
            self.workers,
            self.queue,
            self.clock,
            self.tape,
            recorder,
            edge_rng=stream(c.seed, "edges") if c.clock == "ideal" else None,
            encoding=Encoding(run.codec, c.seed, c.workers, self.tape) if run.codec is not None else None,
            update=self._update,
            on_step_end=self._on_step_end,
        )
        self.exchanges = self.driver.exchanges
        self.total_steps = 0
        """Steps made by all workers together."""
        self.observe_at = math.inf
        """When ``total_steps`` reaches this, the caller observes the cluster: no gradient may begin before that."""
        self.events: list[str] = []
        """Deaths and joins, for people."""
        self._finishing = self._observed = False
        self._has_gradients = run.task.gradients
        self._eval_point = method.eval_point
        self.lifecycle = Lifecycle(method, self.driver, self.replicas, self._start, self.record_event)
        self.lifecycle.begin(run.hardware)

    def record_event(self, event: str) -> None:
        """Report what happened to workers, for people."""
        self.events.append(event)
        if self.recorder is not None:
            self.recorder.add_event(self.queue.now, event)

    # The cycle of a worker

    def _start(self, worker: VirtualWorker) -> None:
        if self.method.background is not None:
            self.driver.run(worker, "background", self.method.background(worker))
        self._schedule_gradient(worker)

    def _schedule_gradient(self, worker: VirtualWorker) -> None:
        worker.gradient_id += 1
        self.queue.schedule(self.queue.now, GRADIENT_BEGIN, self._begin_gradient, worker, worker.gradient_id)

    def _begin_gradient(self, now: float, worker: VirtualWorker, gradient_id: int) -> None:
        if not worker.alive or worker.gradient_id != gradient_id or self._finishing:
            return
        duration = next(worker.gradient_times)
        if not self.clock.instantaneous:
            self._record_gradient(worker, now + duration)
        self.queue.schedule(now + duration, GRADIENT_END, self._end_gradient, worker, gradient_id, duration)

    def _record_gradient(self, worker: VirtualWorker, time: float) -> None:
        """Record the gradient at the worker's present parameters; it ends at ``time``."""
        if self._has_gradients:
            if self._eval_point is None:
                worker.gradient.copy_(worker.x)
            else:
                self._eval_point(worker, worker.gradient)
            self.tape.gradient(worker.gradient, worker.batches)
            self.replicas.gradient_times += (worker.rank, worker.batches, time)
        worker.batches += 1

    def _end_gradient(self, now: float, worker: VirtualWorker, gradient_id: int, duration: float) -> None:
        """Run the method's step."""
        if not worker.alive or worker.gradient_id != gradient_id or self._finishing:
            return
        worker.compute_time += duration
        worker.gradient_time = duration
        if self.clock.instantaneous:
            self._record_gradient(worker, now)
        worker.idle_since = now
        if self.method.step is None:
            self._update(worker)
            self._on_step_end(worker)
        else:
            self.driver.run(worker, "step", self.method.step(worker))

    def _update(self, worker: VirtualWorker) -> None:
        if self._has_gradients:
            self.tape.update(worker.x, worker.gradient, self.replicas.lr(worker.step))

    def _on_step_end(self, worker: VirtualWorker) -> None:
        now = self.queue.now
        if worker.idle_since is not None:
            computed, worker.idle_since = worker.idle_since, None
            worker.idle_time += now - computed
            if self.recorder is not None:
                self.recorder.stepped(worker.rank, computed - worker.gradient_time, computed, now)
                if now > computed:
                    self.recorder.waited(worker.rank, computed, now)
        worker.step += 1
        worker.steps_done += 1
        self.total_steps += 1
        if worker.waiting_for_steps:
            self.driver.resume_waiting_for_steps(worker)
        if self.lifecycle.joining:
            self.lifecycle.join_after_step(worker)
        if self.method.step is None and self.total_steps < self.observe_at and self.queue.settled(OBSERVE):
            # It would be the next event, so it need not pass through the queue.
            worker.gradient_id += 1
            self._begin_gradient(now, worker, worker.gradient_id)
        else:
            self._schedule_gradient(worker)

    # Running

    def run_until(self, time: float) -> None:
        """Run all events up to and at ``time``."""
        self.queue.schedule(time, OBSERVE, self._observe)
        self._observed = False
        while not self._observed:
            self.queue.run_next()
        self.driver.deadlocks.check()

    def _observe(self, now: float) -> None:
        self._observed = True

    def finish(self) -> None:
        """End training: background parts stop, and the method's ``finish`` applies what is in flight."""
        self._finishing = True
        # What is averaged at the end is averaged exactly.
        self.exchanges.encoding = None
        self.driver.end_training()
        if self.method.finish is None:
            return
        for worker in self.workers:
            if worker.alive:
                self.driver.run(worker, "finish", self.method.finish(worker))
        self.driver.drain()

    def check_stalled(self) -> None:
        """Raise ``MethodError`` if there are workers alive, when no event is left: they wait for each other."""
        if self.alive():
            self.driver.raise_stalled()

    # Observing

    def alive(self) -> list[int]:
        return [worker.rank for worker in self.workers if worker.alive]

    def observed(self) -> list[int]:
        """Return the ranks whose models are evaluated: the workers alive, or all of them if none is."""
        return self.alive() or list(range(self.num_workers))

    def consensus(self) -> float:
        """Return the consensus distance of the workers alive, sqrt(mean_i ‖x_i − x̄‖²)."""
        return self.replicas.consensus(self.observed())


def _make_evaluator(run: Run, cache: ComparisonCache | None) -> Evaluator:
    c, task = run.config, run.task
    device = find_device(c.device)
    torch.manual_seed(c.seed)
    model = task.model()
    batches = worker_batches(task, c.partition, c.workers, c.worker_batch, c.seed)
    return Evaluator(
        task,
        model,
        batches,
        seed=c.seed,
        device=device,
        backend=c.gradient_backend,
        precision=c.precision,
        cache=cache,
    )
