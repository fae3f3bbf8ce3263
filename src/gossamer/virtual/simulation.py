"""A run in the virtual world, from its configuration to its result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.config import Run
from gossamer.recording import Recorder
from gossamer.results import Point, Spread, WorkerPoint, to_json_data
from gossamer.virtual.compute.comparison_cache import ComparisonCache
from gossamer.virtual.sim.clock import Clock
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.sim.event_queue import EventQueue
from gossamer.virtual.sim.replicas import Diverged

EVALUATION_BUDGET_FLOPS = 2e11
"""What all evaluations of a run may cost together. A run that would need more evaluates less often."""


@dataclass
class SimulationResult:
    """The result of a simulation. Times are simulated: seconds, or expected gradients on the ideal clock."""

    method: str
    topology: str
    workers: int
    seed: int
    final: Point
    """The state at the end of the run."""
    final_workers: list[WorkerPoint]
    """The state of each worker at the end."""
    history: list[Point]
    """The run over time: a point at the start, one per unit of time or per step of all workers, one at the end."""
    model: Tensor = field(repr=False)
    """The averaged parameters as one flat vector."""
    weights: dict[str, Tensor] = field(repr=False)
    """The ``state_dict`` of the averaged model."""
    worker_bytes_sent: list[int]
    """Bytes sent by each worker."""
    worker_compute_time: list[float]
    """Time that each worker spent on gradients."""
    worker_idle_time: list[float]
    """Time that each worker spent waiting."""
    events: list[str]
    """Deaths and joins of workers, as text."""
    diverged: Diverged | None = None
    """Where the first loss was not finite, with attributes ``time``, ``rank`` and ``step``; None if none was."""
    interrupted: bool = False
    """Ctrl-C ended the run early."""

    def document(self) -> dict[str, Any]:
        """Return the result as data for JSON."""
        head = {"method": self.method, "topology": self.topology, "workers": self.workers, "seed": self.seed}
        per_worker = {
            "worker_bytes_sent": self.worker_bytes_sent,
            "worker_compute_time": self.worker_compute_time,
            "worker_idle_time": self.worker_idle_time,
        }
        end = {"events": self.events, "history": [asdict(point) for point in self.history]}
        if self.diverged is not None:
            end["diverged"] = {"time": self.diverged.time, "worker": self.diverged.rank, "step": self.diverged.step}
        return to_json_data({**head, **asdict(self.final), **per_worker, **end, "interrupted": self.interrupted})


PointCallback = Callable[[Point, list[WorkerPoint], list[str]], None]
"""Called with every point of the history, the state of each worker then, and the events since the last point."""

Observer = Callable[[Point, Callable[[], list[WorkerPoint]], list[str]], None]
"""The same, but the state of each worker is that which a function returns: of many workers, it takes longer to build
than the point. Called later, it returns the state then."""


def observer_of(callback: PointCallback) -> Observer:
    """Return an observer that calls ``callback`` with the state of every worker."""
    return lambda point, workers, events: callback(point, workers(), events)


MakeClock = Callable[[EventQueue], Clock]


def simulate(
    run: Run,
    observer: Observer | None = None,
    recorder: Recorder | None = None,
    make_clock: MakeClock | None = None,
    evaluates_workers: bool = True,
    cache: ComparisonCache | None = None,
) -> SimulationResult:
    """Train in the virtual world.

    Args:
        observer: called with every point of the history.
        make_clock: replaces the hardware clock.
        evaluates_workers: whether an evaluation is also one of each worker's own model, or of the averaged one alone.
        cache: what the run shares with others of a comparison, if it is part of one.
    """
    with torch.random.fork_rng(devices=[run.config.device] if run.config.device.startswith("cuda") else []):
        return _Simulation(run, observer, recorder, make_clock, evaluates_workers, cache).run_to_end()


class _Simulation:
    """Runs a cluster to its end and collects the points of its history."""

    def __init__(
        self,
        run: Run,
        observer: Observer | None,
        recorder: Recorder | None,
        make_clock: MakeClock | None,
        evaluates_workers: bool,
        cache: ComparisonCache | None,
    ) -> None:
        self.run, self.observer, self.evaluates_workers = run, observer, evaluates_workers
        self.began = time.perf_counter()
        self.cluster = Cluster(run, recorder, make_clock, cache)
        self.worker_accuracy: list[float | None] = [None] * run.config.workers
        self.history: list[Point] = []
        self.num_events_reported = 0
        self.copies = 1 if run.replica is None else run.replica.copies
        """How often the ranks of a worker send each vector."""
        self.total_steps = run.config.steps * run.config.workers
        self.final_replaces_last = run.config.clock == "ideal" or self.cluster.method.finish is None
        """Whether the end of the run is at the same time as the last point of its training, which it then replaces."""
        self.withheld = False
        """The newest point waits for the final one, which replaces it."""
        c, evaluator = run.config, self.cluster.evaluator
        flops = 2.0 * evaluator.flat.size * len(run.task.test[0]) * (c.workers + 1) * c.steps
        self.eval_every = c.eval_every or max(1, math.ceil(flops / EVALUATION_BUDGET_FLOPS))

    def run_to_end(self) -> SimulationResult:
        diverged, interrupted = None, False
        try:
            try:
                self._add_point()
                self._train()
                self.cluster.finish()
                self._add_final_point()
            except Diverged as error:
                diverged = error
                if self.withheld:
                    # Nothing replaces it.
                    self._report()
        except KeyboardInterrupt:
            if not self.history:
                raise
            interrupted = True
        return self._result(diverged, interrupted)

    def _train(self) -> None:
        if self.run.config.clock == "ideal":
            # Not the steps, which are random, but the time says which point is the last.
            num_units = self.run.config.steps
            for unit in range(1, num_units + 1):
                self.cluster.run_until(float(unit))
                self._add_point(is_last=unit == num_units)
            return
        # A point is taken after the last event of its moment, so that it includes messages that arrive then.
        cluster, queue, num_workers = self.cluster, self.cluster.queue, self.run.config.workers
        cluster.observe_at = num_workers * len(self.history)
        while (cluster.total_steps < self.total_steps or not queue.settled()) and cluster.advance():
            if cluster.total_steps >= cluster.observe_at and queue.settled():
                self._add_point(is_last=cluster.total_steps >= self.total_steps)
                cluster.observe_at += num_workers
        if cluster.total_steps < self.total_steps:
            cluster.check_stalled()
            cluster.record_event("no worker is left that can go on: the run ends here")
            self._add_point(is_last=True)

    def _add_point(self, is_last: bool = False) -> None:
        self.withheld = is_last and self.final_replaces_last
        evaluate = not self.withheld and (is_last or len(self.history) % self.eval_every == 0)
        self.history.append(self._point(evaluate))
        if not self.withheld:
            self._report()

    def _report(self) -> None:
        """Show the observer the newest point."""
        self.withheld = False
        events = self.cluster.events[self.num_events_reported :]
        self.num_events_reported = len(self.cluster.events)
        if self.observer is not None:
            self.observer(self.history[-1], self._worker_points, events)

    def _add_final_point(self) -> None:
        """Make the last point of the history that of the finished run."""
        last, final = self.history[-1], self._point(evaluate=True)
        if not math.isfinite(final.consensus):
            # The very last step diverged, and no loss was computed after it.
            rank = self.cluster.replicas.first_nonfinite()
            raise Diverged(self.cluster.queue.now, rank, self.cluster.workers[rank].steps_done)
        if final.train_loss is None:
            final = replace(final, train_loss=last.train_loss)
        if final.time == last.time:
            self.history[-1] = final
        else:
            self.history.append(final)
        if self.final_replaces_last:
            self._report()

    def _worker_points(self) -> list[WorkerPoint]:
        now, points = self.cluster.queue.now, []
        for worker in self.cluster.workers:
            lifetime = worker.lifetime_until(now)
            points.append(
                WorkerPoint(
                    rank=worker.rank,
                    state="gone" if not worker.alive else "training" if worker.idle_since is None else "waiting",
                    steps=worker.steps_done,
                    exchanges=worker.exchanges,
                    bytes_sent=self.copies * worker.bytes_sent,
                    busy=1.0 - worker.idle_until(now) / lifetime if lifetime else 1.0,
                    accuracy=self.worker_accuracy[worker.rank],
                )
            )
        return points

    def _point(self, evaluate: bool) -> Point:
        cluster, c = self.cluster, self.run.config
        now, workers = cluster.queue.now, cluster.workers
        train_loss = cluster.replicas.take_losses()
        consensus = cluster.consensus()
        loss = accuracy = None
        accuracies: list[float] | None = None
        self.worker_accuracy = [None] * c.workers
        if evaluate and self.run.task.gradients:
            loss, accuracy, accuracies = self._evaluate(consensus)
            for rank, worker_accuracy in zip(cluster.observed(), accuracies or (), strict=accuracies is not None):
                self.worker_accuracy[rank] = worker_accuracy
        idle = sum(worker.idle_until(now) for worker in workers)
        lifetime = sum(worker.lifetime_until(now) for worker in workers)
        return Point(
            time=now,
            steps=round(cluster.total_steps / c.workers),
            total_steps=cluster.total_steps,
            worker_steps=Spread.of([float(worker.steps_done) for worker in workers]),
            samples=cluster.total_steps * c.worker_batch if self.run.task.gradients else 0,
            loss=loss,
            train_loss=train_loss,
            accuracy=accuracy,
            worker_accuracy=Spread.of(accuracies),
            consensus=consensus,
            exchanges=cluster.exchanges.count,
            bytes_sent=self.copies * sum(worker.bytes_sent for worker in workers),
            utilization=1.0 - idle / lifetime if lifetime else 1.0,
            workers_alive=len(cluster.alive()),
            wall_s=time.perf_counter() - self.began,
        )

    def _evaluate(self, consensus: float) -> tuple[float, float | None, list[float] | None]:
        """Return loss and accuracy of the averaged model, and the accuracy of each observed worker's model."""
        replicas, evaluator, ranks = self.cluster.replicas, self.cluster.evaluator, self.cluster.observed()
        losses, accuracies = evaluator.scores(replicas.mean_model(ranks)[None], replicas.mean_buffers(ranks)[None])
        if accuracies is None:
            return float(losses), None, None
        if not self.evaluates_workers:
            return float(losses), float(accuracies), None
        rows, buffers = replicas.rows(), evaluator.buffers
        if len(ranks) < len(rows):
            rows, buffers = rows[ranks], buffers[ranks]
        if consensus == 0.0 and bool((buffers == buffers[0]).all()):
            return float(losses), float(accuracies), [float(accuracies)] * len(ranks)
        _, worker_accuracies = evaluator.scores(rows, buffers)
        assert worker_accuracies is not None
        return float(losses), float(accuracies), worker_accuracies.tolist()

    def _result(self, diverged: Diverged | None, interrupted: bool) -> SimulationResult:
        cluster, c = self.cluster, self.run.config
        evaluator, ranks = cluster.evaluator, cluster.observed()
        model = cluster.replicas.mean_model(ranks)
        evaluator.bind_model(model.clone())
        buffers = dict(evaluator.model.named_buffers())
        evaluator.buffer_flat.unpack(cluster.replicas.mean_buffers(ranks), buffers)
        for name, buffer in buffers.items():
            if name.endswith("num_batches_tracked"):
                buffer.fill_(round(sum(worker.batches for worker in cluster.workers) / c.workers))
        return SimulationResult(
            method=c.method,
            topology=self.run.topology.name,
            workers=c.workers,
            seed=c.seed,
            final=self.history[-1],
            final_workers=self._worker_points(),
            history=self.history,
            model=model,
            weights={name: tensor.cpu().clone().contiguous() for name, tensor in evaluator.model.state_dict().items()},
            worker_bytes_sent=[self.copies * worker.bytes_sent for worker in cluster.workers],
            worker_compute_time=[worker.compute_time for worker in cluster.workers],
            worker_idle_time=[worker.idle_time for worker in cluster.workers],
            events=cluster.events,
            diverged=diverged,
            interrupted=interrupted,
        )
