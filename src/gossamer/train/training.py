"""One worker's part in a run, from joining the others to its last status."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gossamer.config import Run
from gossamer.errors import InputError
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.rank_info import RankInfo
from gossamer.runs.recording_file import RecordingFile
from gossamer.runs.run_folder import CHECKPOINTS
from gossamer.runs.status import DONE, LEFT, TRAINING, StatusBoard, WorkerStatus
from gossamer.runs.status_reporter import StatusReporter
from gossamer.train.checkpoint import Checkpoint, Layout, find_checkpoint, sharded_folder, worker_file, write_state
from gossamer.train.job_spec import JobSpec
from gossamer.train.newcomers.newcomer_job import job_for_newcomers
from gossamer.train.pacing import EvalSchedule, StepMeter
from gossamer.train.replica.step_decision import StepDecision
from gossamer.train.status_counts import measure, measure_exchanges
from gossamer.train.stop_coordinator import StopCoordinator
from gossamer.train.training_state import collect_state, displace_start, load_average, load_state, save_average
from gossamer.train.worker_task import LossMeter, WorkerTask
from gossamer.vectors.vector_math import rounded_distance

if TYPE_CHECKING:
    from gossamer.train.replica.rank import ReplicaRank

CUMULATIVE = ("seconds", "idle_s", "loss_sum", "loss_count", "exchanges", "bytes_sent", "lost", "refused")
"""Counts of a worker that continue when a run is resumed."""

END = object()

MAX_NONFINITE = 10
"""This many losses in a row that are not finite: the worker has diverged, and no peer's weights have helped."""


class Training:
    def __init__(
        self,
        job_spec: JobSpec,
        run: Run,
        rank_info: RankInfo,
        board: StatusBoard,
        coordinator: StopCoordinator,
        should_stop: Callable[[], bool],
        replica: ReplicaRank | None = None,
    ) -> None:
        """``replica``: which rank of its worker this process is; None if the worker is this process."""
        self.job_spec, self.run, self.rank_info, self.board = job_spec, run, rank_info, board
        self.coordinator, self._should_stop, self.replica = coordinator, should_stop, replica
        self.rank = rank_info.rank
        self._resumed_status = WorkerStatus(self.rank)
        """The counts of this worker when the run was resumed."""
        earlier = board.get(self.rank)
        self._steps_before_restart = self._leaders(0 if earlier is None else earlier.steps)
        """Steps of an earlier process of this worker that died."""
        self.status = WorkerStatus(self.rank, steps=self._steps_before_restart)
        self.task = WorkerTask(run, self.rank, replica)
        self.checkpoint: Checkpoint | None = None
        if job_spec.checkpoint:
            self.checkpoint = find_checkpoint(Path(job_spec.checkpoint))
        c, method = run.config, run.method()
        self.layout = Layout.of(job_spec.values)
        self.pace = job_spec.pace(run, self.rank, coordinator.stop_requested, self.shard)
        self._spread = None if replica is None else replica.spread_pace(self.task.plain_model, self.pace)
        period = getattr(method, "period", 1)
        self.step_meter = StepMeter(max(1, period if isinstance(period, int) else 1))
        self.losses = LossMeter(self.task.device)
        self.eval_schedule = EvalSchedule(c.eval_every, c.workers)
        self.lockstep = method.lockstep
        self._is_new = rank_info.rank in rank_info.came
        self._steps_without = 0
        """In lockstep: how many steps the others had made when this worker came to the run."""
        self._leaves = False
        """This worker leaves the run for good before its end."""
        self._saved_at = 0
        self._checkpoint_requested = 0
        recording = None
        if job_spec.path is not None:
            # Without a recording if the folder cannot be written to.
            with contextlib.suppress(OSError, InputError):
                recording = RecordingFile(job_spec.path, self.rank, job_spec.trace, shard=self.shard)
        self.reporter = StatusReporter(board, job_spec.path if self.leads else None, recording, self.status)
        self.runtime: WorkerRuntime
        self.swarm: Swarm
        self._began = 0.0
        self._trained = False
        self._measure_lock = threading.Lock()

    # Training

    def run_all(self) -> WorkerStatus:
        """Join, train, average and evaluate; return the last status, which is published too."""
        self.board.put(self.status)
        if self.checkpoint is not None and not self._continues:
            self._resumed_status.seconds = load_average(self.task, self.checkpoint)
        recording = self.reporter.recording
        method, codec, seed, replica = self.run.method(), self.run.codec, self.run.config.seed, self.replica
        model = self.task.model
        if replica is not None:
            model = replica.check(model, self.task.optimizer, method, codec, seed)
        runtime = self.runtime = WorkerRuntime(
            model,
            self.task.optimizer,
            method,
            self.run.topology,
            self.rank_info,
            seed,
            recorder=recording.recorder if recording is not None else None,
            codec=codec,
            replica=None if replica is None else replica.connect(self.lockstep),
            job="" if replica is not None else job_for_newcomers(self.job_spec, self.checkpoint, self.layout),
        )
        self.coordinator.everybody = runtime.everybody
        swarm = self.swarm = Swarm(runtime)
        if self._is_new and self.lockstep:
            self._steps_without = runtime.worker.step
        if recording is not None:
            recording.begin()
        try:
            if self.checkpoint is not None and self._continues:
                status = load_state(self.task, self.pace, self.checkpoint, swarm, self.layout)
                self._resumed_status = replace(self._resumed_status, **status)
            elif self.checkpoint is None and not self._is_new:
                displace_start(self.run, self.rank, self.runtime)
            self._began = time.monotonic()
            self.status.state = TRAINING
            self.reporter.publish_first()
            stopping = self.coordinator.stop_requested
            self.reporter.start(self._update_status, stopping, swarm.events)
            for _ in self._turns() if replica is None else self._replicas_turns(replica):
                if runtime.worker.placement.ranks != self.task.ranks:
                    self.task.deal(runtime.worker.placement.ranks)
                self._step(self.steps_done)
                self._save_if_due()
            if self._leaves:
                self._leave(swarm)
                return self.status
            self._finish(swarm)
        except BaseException:
            if self._began:
                self._measure()
            swarm.close()
            raise
        finally:
            self.reporter.stop()
        self.reporter.publish_last()
        return self.status

    @property
    def _continues(self) -> bool:
        """Whether this worker continues as the one that it was in the checkpoint."""
        return self.checkpoint is not None and self.checkpoint.fits(self.layout) and not self._steps_before_restart

    @property
    def steps_done(self) -> int:
        """The steps of this worker so far, including those before a restart or a resume."""
        step = self.runtime.worker.step
        if self._steps_before_restart and not self.lockstep:
            return step + self._steps_before_restart
        if self.checkpoint is not None and not self.checkpoint.fits(self.layout):
            return step + self.checkpoint.mean_steps()
        return step

    @property
    def shard(self) -> int:
        return 0 if self.replica is None else self.replica.shard

    @property
    def leads(self) -> bool:
        """Whether this process decides for its worker: the first of its ranks does."""
        return self.shard == 0

    def _leaders(self, number: int) -> int:
        """Return the number of the first rank of this worker. All its ranks must call it."""
        return number if self.replica is None else self.replica.leaders(number)

    def _replicas_turns(self, replica: ReplicaRank) -> Iterator[None]:
        """Yield once per step that this rank shall make together with the others of its replica."""
        own = self._turns() if replica.leads else None
        evaluated_at = 0
        while True:
            due = self.steps_done > evaluated_at and self.eval_schedule.due(time.monotonic(), self.steps_done)
            go = own is None or next(own, END) is not END
            stopping = self.coordinator.stop_requested.is_set()
            decision = replica.decisions.agree(StepDecision(go, due, self._checkpoint_requested, stopping))
            if decision.stopping and not stopping:
                self.coordinator.stop_requested.set()
            self._save_requested(decision.checkpoint)
            if decision.evaluate:
                evaluated_at = self.steps_done
                self._evaluate()
            if not decision.go:
                return
            yield

    def _turns(self) -> Iterator[None]:
        """Yield once per step that this worker shall make, until it is asked to stop or to leave."""
        for _ in self._dealt_turns():
            self._leaves = self.coordinator.shall_leave
            if self._leaves or not self.coordinator.may_begin(self.steps_done):
                return
            yield

    def _dealt_turns(self) -> Iterator[None]:
        c = self.run.config
        if not self.lockstep:
            # A worker that continues has told the swarm how many steps were made; one that starts anew has not.
            earlier = self.job_spec.done_before
            if self.checkpoint is not None and not self._continues:
                earlier = self.checkpoint.total_steps(self.layout)
            yield from self.swarm._deal_turns(c.steps * c.workers - earlier)
        while self.lockstep and self.steps_done < c.steps:
            yield None

    def _step(self, step: int) -> None:
        began = time.monotonic()
        if self._spread is not None:
            self._spread.gradient_s = self.pace.draw()
        loss = self.task.gradient(step)
        if loss is not None:
            self.losses.add(loss)
            if self.eval_schedule.estimating:
                self.task.synchronize()
                # An evaluation costs about a third of a gradient per mini-batch.
                cost_s = (time.monotonic() - began) * self.task.num_test_batches / 3
                self.eval_schedule.estimate(began, cost_s)
        if not self.pace.natural and self._spread is None:
            self.task.synchronize()
            self.pace.delay(began)
        self.task.update(step)
        self.step_meter.add(time.monotonic())
        if (
            self.replica is None
            and self.steps_done > step
            and self.eval_schedule.due(time.monotonic(), self.steps_done)
        ):
            self._evaluate()

    def _evaluate(self) -> None:
        began = time.monotonic()
        # A model may draw random numbers in evaluation too; training's stay the same.
        with torch.random.fork_rng([self.task.device] if self.task.device.type == "cuda" else []):
            self.status.own_loss, self.status.own_accuracy = self.task.evaluate()
        now = time.monotonic()
        self.eval_schedule.evaluated(now, now - began)

    def _leave(self, swarm: Swarm) -> None:
        """Leave the run for good: the others go on without this worker."""
        self.task.synchronize()
        with self._measure_lock:
            self._measure()
            self._trained = True
        swarm.leave()
        self.reporter.stop()
        self.status.state = LEFT
        self.reporter.publish_last(ended=False)

    def _finish(self, swarm: Swarm) -> None:
        """Make the final average, and evaluate before and after it."""
        self.task.synchronize()
        interrupted = self.coordinator.stop_requested.is_set() and self.status.diverged_at is None
        self.status.interrupted = bool(self._leaders(interrupted))
        if self.status.interrupted:
            self._save_last()
        with self._measure_lock:
            self._measure()
            self._trained = True
        self.status.own_loss, self.status.own_accuracy = self.task.evaluate()
        own = self.task.parameters() if self.replica is None else None
        swarm.finish()
        self.status.missing = list(swarm.missing)
        measure_exchanges(self.status, self._resumed_status, self.swarm.metrics())
        measured = swarm.metrics().consensus
        self.status.consensus = measured if own is None else rounded_distance(own, self.task.parameters())
        self.status.loss, self.status.accuracy = self.task.evaluate()
        self.status.state = DONE
        folder = self.job_spec.path
        chosen = folder is not None and (not self.leads or self.board.agree("model", self.rank) == self.rank)
        if folder is not None and self._leaders(chosen):
            weights = self.task.weights()
            if not self.leads:
                return
            try:
                save_average(folder, self.run, weights)
            except InputError as error:
                self.status.error = str(error)

    # Checkpoints

    def _save_if_due(self) -> None:
        """Workers in lockstep write a checkpoint at the same step, others when the monitor requests one."""
        every, workers = self.job_spec.checkpoint_every, self.rank_info.workers
        if self.lockstep and every and self.steps_done % every == 0:
            self._save(self.steps_done * workers)
        elif self.replica is None:
            self._save_requested(self._checkpoint_requested)

    def _save_requested(self, total_steps: int) -> None:
        if not self.lockstep and total_steps > self._saved_at:
            self._save(total_steps)

    def _save_last(self) -> None:
        workers = self.rank_info.workers
        published = [self.board.get(rank) for rank in range(self.runtime.everybody.value.largest + 1)]
        total = self.steps_done * workers if self.lockstep else sum(status.steps for status in published if status)
        self._save(self._leaders(self.board.agree("last checkpoint", total) if self.leads else 0))

    def _save(self, total_steps: int) -> None:
        """Write this worker's file of the checkpoint after so many steps; a full disk does not stop training."""
        folder = self.job_spec.path
        if folder is None or total_steps <= self._saved_at:
            return
        self._saved_at = total_steps
        name = str(total_steps + self.job_spec.named_from)
        path = worker_file(folder / CHECKPOINTS / name, self.rank, self.shard)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save = None if self.replica is None else self.replica.saver(sharded_folder(path.parent, self.rank))
            write_state(path, self._state(), self.steps_done, save)
        except OSError as error:
            self.reporter.events.append(f"no checkpoint after {total_steps} steps: {error.strerror}; training goes on")

    def _state(self) -> dict[str, Any]:
        with self._measure_lock:
            self._measure()
            status = asdict(self.status)
        counts = {name: status[name] for name in CUMULATIVE}
        return collect_state(self.task, self.pace, counts, self.swarm.state_dict())

    # Status (in the status thread, and at the end)

    def _update_status(self) -> None:
        if self._should_stop():
            self.coordinator.stop_requested.set()
        with self._measure_lock:
            if not self._trained:
                self._measure()
        if self.losses.nonfinite_in_a_row() >= MAX_NONFINITE and self.status.diverged_at is None:
            self.status.diverged_at = self.steps_done
            self.coordinator.stop_requested.set()
        self._checkpoint_requested = max(self._checkpoint_requested, self.board.requested_checkpoint())
        self.coordinator.poll(self.board, self._gone)

    def _gone(self, rank: int) -> bool:
        status = self.board.get(rank)
        return self.runtime.heartbeats.dead(rank) or (status is not None and status.state == DONE)

    def _measure(self) -> None:
        """Update the counts in the status; only while training, since the final ones differ."""
        status = self.status
        status.steps = self.steps_done - self._steps_without
        status.seconds = self._resumed_status.seconds + time.monotonic() - self._began
        status.step_s = self.step_meter.mean_s()
        measure(status, self._resumed_status, self.swarm.metrics(), self.losses)
