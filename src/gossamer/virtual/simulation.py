"""A run in the virtual world, from its settings to its results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.config import Run, find_device
from gossamer.recording import Recorder
from gossamer.results import Point, Spread, WorkerPoint, to_json_data
from gossamer.seeds import stream
from gossamer.tasks import worker_batches
from gossamer.virtual.compute.evaluator import Evaluator
from gossamer.virtual.compute.losses import Diverged
from gossamer.virtual.sim.clock import Clock
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.sim.event_queue import EventQueue

EVALUATION_BUDGET = 2e11
"""Operations that all evaluations of a run may take together before they become rarer."""


@dataclass
class SimulationResult:
    """What a run came to."""

    method: str
    topology: str
    workers: int
    seed: int
    final: Point
    final_workers: list[WorkerPoint]
    history: list[Point]
    model: Tensor = field(repr=False)
    """The averaged model, flat."""
    weights: dict[str, Tensor] = field(repr=False)
    """The averaged model's state_dict."""
    worker_bytes_sent: list[int]
    worker_compute_time: list[float]
    worker_idle_time: list[float]
    events: list[str]
    diverged: Diverged | None = None
    interrupted: bool = False
    """TrainingEnded by Ctrl-C before its end."""

    def document(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        head = {"method": self.method, "topology": self.topology, "workers": self.workers, "seed": self.seed}
        per_worker = {
            "worker_bytes_sent": self.worker_bytes_sent,
            "worker_compute_time": self.worker_compute_time,
            "worker_idle_time": self.worker_idle_time,
        }
        end = {"events": self.events, "history": [asdict(point) for point in self.history]}
        if self.diverged is not None:
            end["diverged"] = {"time": self.diverged.time, "worker": self.diverged.rank, "step": self.diverged.step}
        return to_json_data({**head, **asdict(self.final), **per_worker, **end})


PointCallback = Callable[[Point, list[WorkerPoint], list[str]], None]
"""Called with every point of the history, the same for each worker, and what happened to the workers since the last."""


def simulate(run: Run, callback: PointCallback | None = None, recorder: Recorder | None = None) -> SimulationResult:
    """Train in the virtual world."""
    with torch.random.fork_rng(devices=[run.config.device] if run.config.device.startswith("cuda") else []):
        return _Simulation(run, callback, recorder).result()


def make_evaluator(run: Run) -> Evaluator:
    """The task's model, and each worker's data."""
    c, task = run.config, run.task
    device = find_device(c.device)
    torch.manual_seed(c.seed)
    model = task.model()
    batches = worker_batches(task, c.partition, c.workers, c.batch, c.seed)
    return Evaluator(task, model, batches, seed=c.seed, device=device, way=c.gradient_backend, precision=c.precision)


def make_cluster(
    run: Run, recorder: Recorder | None = None, make_clock: Callable[[EventQueue], Clock] | None = None
) -> Cluster:
    """The virtual cluster of a run, before its first step; ``make_clock``: on another clock than the run's."""
    c, task = run.config, run.task
    evaluator = make_evaluator(run)
    start = None
    if task.start is not None:
        vectors = [task.start(rank, stream(c.seed, "start", rank)) for rank in range(c.workers)]
        start = [torch.as_tensor(vector, dtype=evaluator.flat.dtype, device=evaluator.device) for vector in vectors]
    return Cluster(
        evaluator=evaluator,
        method=run.method(),
        topology=run.topology,
        make_optimizer=run.make_optimizer,
        schedule=run.schedule,
        clock=c.clock,
        hardware=run.hardware,
        seed=c.seed,
        start=start,
        recorder=recorder,
        make_clock=make_clock,
    )


class _Simulation:
    def __init__(self, run: Run, callback: PointCallback | None, recorder: Recorder | None) -> None:
        self.run, self.callback = run, callback
        self.began = time.perf_counter()
        self.cluster = make_cluster(run, recorder)
        self.worker_accuracy: list[float | None] = [None] * run.config.workers
        self.history: list[Point] = []
        self.told = 0
        self.stop_at = run.config.steps * run.config.workers
        c, evaluator = run.config, self.cluster.evaluator
        cost = 2.0 * evaluator.flat.size * len(run.task.test[0]) * (c.workers + 1) * c.steps
        self.eval_every = c.eval_every or max(1, math.ceil(cost / EVALUATION_BUDGET))

    def result(self) -> SimulationResult:
        diverged, interrupted = None, False
        try:
            self.observe()
            self.train()
            self.cluster.finish()
            self.close()
        except Diverged as error:
            diverged = error
        except KeyboardInterrupt:
            if not self.history:
                raise
            interrupted = True
        return self.packed(diverged, interrupted)

    def train(self) -> None:
        if self.run.config.clock == "ideal":
            for unit in range(1, self.run.config.steps + 1):
                self.cluster.run_until(float(unit))
                self.observe()
            return
        # A point is taken when its instant is over: what arrives at the same moment is in it.
        each, queue = self.run.config.workers, self.cluster.queue
        self.cluster.look_at = each * len(self.history)
        while (self.cluster.total_steps < self.stop_at or not queue.settled()) and self.cluster.advance():
            if self.cluster.total_steps >= self.cluster.look_at and queue.settled():
                self.observe()
                self.cluster.look_at += each
        if self.cluster.total_steps < self.stop_at:
            self.cluster.say("nothing can happen any more: no worker is left that could go on")
            self.observe()

    def close(self) -> None:
        """Make the last point of the history that of the finished run."""
        last, final = self.history[-1], self.point(evaluate=True)
        if not math.isfinite(final.consensus):
            # The very last step did it: no loss was taken after it.
            raise self.cluster.divergence()
        if final.train_loss is None:
            final = replace(final, train_loss=last.train_loss)
        if final.time == last.time:
            self.history[-1] = final
        else:
            self.history.append(final)

    def observe(self) -> None:
        """Add a point to the history."""
        last = self.cluster.total_steps >= self.stop_at
        point = self.point(evaluate=last or len(self.history) % self.eval_every == 0)
        self.history.append(point)
        events = self.cluster.events[self.told :]
        self.told = len(self.cluster.events)
        if self.callback is not None:
            self.callback(point, self.worker_points(), events)

    def worker_points(self) -> list[WorkerPoint]:
        """How far each worker is."""
        now, points = self.cluster.queue.now, []
        for worker in self.cluster.workers:
            waiting = worker.idle_since is not None
            idle = worker.idle_time + (now - worker.idle_since if worker.idle_since is not None else 0.0)
            lived = worker.lived + (now - worker.born if worker.alive else 0.0)
            points.append(
                WorkerPoint(
                    rank=worker.rank,
                    state="gone" if not worker.alive else "waiting" if waiting else "training",
                    steps=worker.steps_done,
                    exchanges=worker.exchanges,
                    bytes_sent=worker.bytes_sent,
                    busy=1.0 - idle / lived if lived else 1.0,
                    accuracy=self.worker_accuracy[worker.rank],
                )
            )
        return points

    def point(self, evaluate: bool) -> Point:
        cluster, c = self.cluster, self.run.config
        train_loss = cluster.take_losses()
        consensus = cluster.consensus()
        loss = accuracy = None
        workers: list[float] | None = None
        self.worker_accuracy = [None] * c.workers
        if evaluate and self.run.task.gradients:
            loss, accuracy, workers = self.evaluate(consensus)
            for rank, correct in zip(cluster.observed(), workers or (), strict=workers is not None):
                self.worker_accuracy[rank] = correct
        made = [worker.steps_done for worker in cluster.workers]
        return Point(
            time=cluster.queue.now,
            steps=round(cluster.total_steps / c.workers),
            total_steps=cluster.total_steps,
            worker_steps=Spread.of([float(count) for count in made]),
            samples=cluster.total_steps * c.batch if self.run.task.gradients else 0,
            loss=loss,
            train_loss=train_loss,
            accuracy=accuracy,
            worker_accuracy=Spread.of(workers),
            consensus=consensus,
            exchanges=cluster.exchanges.count,
            bytes_sent=sum(worker.bytes_sent for worker in cluster.workers),
            utilization=cluster.utilization(),
            workers_alive=len(cluster.alive()),
            wall_s=time.perf_counter() - self.began,
        )

    def evaluate(self, consensus: float) -> tuple[float, float | None, list[float] | None]:
        """Loss and accuracy of the averaged model, and accuracy of each worker's."""
        cluster, evaluator = self.cluster, self.cluster.evaluator
        losses, corrects = evaluator.scores(cluster.mean_model()[None], cluster.mean_buffers()[None])
        if corrects is None:
            return float(losses), None, None
        ranks = cluster.observed()
        if consensus == 0.0 and not evaluator.buffer_flat.size:
            return float(losses), float(corrects), [float(corrects)] * len(ranks)
        rows = cluster.rows()
        whole = len(ranks) == len(rows)
        own = evaluator.scores(rows if whole else rows[ranks], evaluator.buffers if whole else evaluator.buffers[ranks])
        assert own[1] is not None
        return float(losses), float(corrects), own[1].tolist()

    def packed(self, diverged: Diverged | None, interrupted: bool) -> SimulationResult:
        cluster, c = self.cluster, self.run.config
        evaluator, model = cluster.evaluator, cluster.mean_model()
        evaluator.lay_over(model.clone())
        buffers = dict(evaluator.model.named_buffers())
        evaluator.buffer_flat.unpack(cluster.mean_buffers(), buffers)
        for name, buffer in buffers.items():
            if name.endswith("num_batches_tracked"):
                buffer.fill_(round(sum(worker.batches for worker in cluster.workers) / c.workers))
        return SimulationResult(
            method=c.method,
            topology=self.run.topology.name,
            workers=c.workers,
            seed=c.seed,
            final=self.history[-1],
            final_workers=self.worker_points(),
            history=self.history,
            model=model,
            weights={name: tensor.cpu().clone().contiguous() for name, tensor in evaluator.model.state_dict().items()},
            worker_bytes_sent=[worker.bytes_sent for worker in cluster.workers],
            worker_compute_time=[worker.compute_time for worker in cluster.workers],
            worker_idle_time=[worker.idle_time for worker in cluster.workers],
            events=cluster.events,
            diverged=diverged,
            interrupted=interrupted,
        )
