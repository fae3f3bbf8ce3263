"""One worker's part in a run, from joining the others to its last status."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gossamer.config import Run
from gossamer.errors import InputError
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.rank_info import RankInfo
from gossamer.runs.recording_file import RecordingFile
from gossamer.runs.run_folder import CHECKPOINTS, save_model
from gossamer.runs.status import DONE, LEFT, TRAINING, StatusBoard, WorkerStatus
from gossamer.runs.status_reporter import StatusReporter
from gossamer.seeds import stream
from gossamer.train.checkpoint import Checkpoint, find_checkpoint, worker_file, write_state
from gossamer.train.job_spec import JobSpec
from gossamer.train.newcomer_job import job_for_newcomers
from gossamer.train.pacing import EvalSchedule, StepMeter
from gossamer.train.stop_coordinator import StopCoordinator
from gossamer.train.worker_task import LossMeter, WorkerTask
from gossamer.vectors.vector_math import rounded_distance

CUMULATIVE = ("seconds", "idle_s", "loss_sum", "loss_count", "exchanges", "bytes_sent", "lost", "refused")
"""Counts of a worker that continue when a run is resumed."""

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
    ) -> None:
        self.job_spec, self.run, self.rank_info, self.board = job_spec, run, rank_info, board
        self.coordinator, self._should_stop = coordinator, should_stop
        self.rank = rank_info.rank
        self._resumed_status = WorkerStatus(self.rank)
        """The counts of this worker when the run was resumed."""
        earlier = board.get(self.rank)
        self._steps_before_restart = 0 if earlier is None else earlier.steps
        """Steps of an earlier process of this worker that died."""
        self.status = WorkerStatus(self.rank, steps=self._steps_before_restart)
        self.task = WorkerTask(run, self.rank)
        self.checkpoint: Checkpoint | None = None
        if job_spec.checkpoint:
            self.checkpoint = find_checkpoint(Path(job_spec.checkpoint))
        c, method = run.config, run.method()
        self.pace = job_spec.pace(run, self.rank, coordinator.stop_requested)
        period = getattr(method, "period", 1)
        self.step_meter = StepMeter(max(1, period if isinstance(period, int) else 1))
        self.losses = LossMeter(self.task.device)
        self.eval_schedule = EvalSchedule(c.eval_every, c.workers)
        self.lockstep = method.lockstep
        self._is_new = rank_info.rank in rank_info.came
        self._steps_without = 0
        """In lockstep: how many steps the others had made when this worker came to the run."""
        self._saved_at = 0
        self._checkpoint_requested = 0
        recording = None
        if job_spec.path is not None:
            # Without a recording if the folder cannot be written to.
            with contextlib.suppress(OSError, InputError):
                recording = RecordingFile(job_spec.path, self.rank, job_spec.trace)
        self.reporter = StatusReporter(board, job_spec.path, recording, self.status)
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
            self._load_average(self.checkpoint)
        recording = self.reporter.recording
        runtime = self.runtime = WorkerRuntime(
            self.task.model,
            self.task.optimizer,
            self.run.method(),
            self.run.topology,
            self.rank_info,
            self.run.config.seed,
            recorder=recording.recorder if recording is not None else None,
            codec=self.run.codec,
            job=job_for_newcomers(self.job_spec, self.checkpoint, self.rank_info.workers),
        )
        self.coordinator.everybody = runtime.everybody
        swarm = self.swarm = Swarm(runtime)
        if self._is_new and self.lockstep:
            self._steps_without = runtime.worker.step
        if recording is not None:
            recording.begin()
        try:
            if self.checkpoint is None:
                self._displace_start()
            elif self._continues:
                self._load_state(self.checkpoint.state(self.rank))
            self._began = time.monotonic()
            self.status.state = TRAINING
            self.reporter.publish_first()
            stopping = self.coordinator.stop_requested
            self.reporter.start(self._update_status, stopping, swarm.events)
            for _ in self._turns():
                step = self.steps_done
                if self.coordinator.shall_leave(step, self.step_meter.period):
                    self._leave(swarm)
                    return self.status
                if not self.coordinator.may_begin(step):
                    break
                if runtime.worker.placement.ranks != self.task.ranks:
                    self.task.deal(runtime.worker.placement.ranks)
                self._step(step)
                self._save_if_due()
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
        return (
            self.checkpoint is not None
            and self.checkpoint.fits(self.rank_info.workers)
            and not self._steps_before_restart
        )

    @property
    def steps_done(self) -> int:
        """The steps of this worker so far, including those before a restart or a resume."""
        step = self.runtime.worker.step
        if self._steps_before_restart and not self.lockstep:
            return step + self._steps_before_restart
        if self.checkpoint is not None and not self.checkpoint.fits(self.rank_info.workers):
            return step + self.checkpoint.mean_steps()
        return step

    def _turns(self) -> Iterator[None]:
        """Yield once per step that this worker shall make."""
        c = self.run.config
        if not self.lockstep:
            # A worker that continues has told the swarm how many steps were made; one that starts anew has not.
            earlier = self.job_spec.done_before
            if self.checkpoint is not None and not self._continues:
                earlier = self.checkpoint.total_steps(c.workers)
            yield from self.swarm.batches(itertools.repeat(None), total_steps=c.steps * c.workers - earlier)
        while self.lockstep and self.steps_done < c.steps:
            yield None

    def _step(self, step: int) -> None:
        began = time.monotonic()
        loss = self.task.gradient(step)
        if loss is not None:
            self.losses.add(loss)
            if self.eval_schedule.estimating:
                self.task.synchronize()
                # An evaluation costs about a third of a gradient per mini-batch.
                cost_s = (time.monotonic() - began) * self.task.num_test_batches / 3
                self.eval_schedule.estimate(began, cost_s)
        if not self.pace.natural:
            self.task.synchronize()
            self.pace.delay(began)
        self.task.update(step)
        self.step_meter.add(time.monotonic())
        if self.steps_done > step:
            self._evaluate_if_due()

    def _evaluate_if_due(self) -> None:
        began = time.monotonic()
        if self.eval_schedule.due(began, self.steps_done):
            # A model may draw random numbers in evaluation too; training's stay the same.
            with torch.random.fork_rng([self.task.device] if self.task.device.type == "cuda" else []):
                self.status.own_loss, self.status.own_accuracy = self.task.evaluate()
            now = time.monotonic()
            self.eval_schedule.evaluated(now, now - began)

    def _displace_start(self) -> None:
        """Move to this worker's own start, if the task has one per worker (the consensus task)."""
        task = self.run.task
        if task.start is not None and not self._is_new:
            start = task.start(self.rank, stream(self.run.config.seed, "start", self.rank))
            with self.runtime.state.lock:
                x = self.runtime.flat_model.x
                self.runtime.flat_model.load_weights(x.add_(torch.as_tensor(start).to(x)))

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
        self.status.interrupted = self.coordinator.stop_requested.is_set() and self.status.diverged_at is None
        if self.status.interrupted:
            self._save_last()
        with self._measure_lock:
            self._measure()
            self._trained = True
        self.status.own_loss, self.status.own_accuracy = self.task.evaluate()
        own = _parameters(self.task)
        swarm.finish()
        self.status.missing = list(swarm.missing)
        self._measure_exchanges()
        self.status.consensus = rounded_distance(own, _parameters(self.task))
        self.status.loss, self.status.accuracy = self.task.evaluate()
        self.status.state = DONE
        folder = self.job_spec.path
        if folder is not None and self.board.agree("model", self.rank) == self.rank:
            c = self.run.config
            about = {"method": c.method, "topology": c.topology, "workers": c.workers, "seed": c.seed, "steps": c.steps}
            try:
                save_model(folder, self.task.weights(), {name: str(value) for name, value in about.items()})
            except InputError as error:
                self.status.error = str(error)

    # Checkpoints

    def _save_if_due(self) -> None:
        """Workers in lockstep write a checkpoint at the same step, others when the monitor requests one."""
        every, workers = self.job_spec.checkpoint_every, self.rank_info.workers
        if self.lockstep and every and self.steps_done % every == 0:
            self._save(self.steps_done * workers)
        elif not self.lockstep and self._checkpoint_requested > self._saved_at:
            self._save(self._checkpoint_requested)

    def _save_last(self) -> None:
        workers = self.rank_info.workers
        published = [self.board.get(rank) for rank in range(self.runtime.everybody.value.largest + 1)]
        total = self.steps_done * workers if self.lockstep else sum(status.steps for status in published if status)
        self._save(self.board.agree("last checkpoint", total))

    def _save(self, total_steps: int) -> None:
        """Write this worker's file of the checkpoint of that name; a full disk does not stop training."""
        folder = self.job_spec.path
        if folder is None or total_steps <= self._saved_at:
            return
        self._saved_at = total_steps
        path = worker_file(folder / CHECKPOINTS / str(total_steps), self.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_state(path, self._state(), self.steps_done)
        except OSError as error:
            self.reporter.events.append(f"no checkpoint after {total_steps} steps: {error.strerror}; training goes on")

    def _state(self) -> dict[str, Any]:
        with self._measure_lock:
            self._measure()
            status = asdict(self.status)
        state = {
            "status": {name: status[name] for name in CUMULATIVE},
            "swarm": self.swarm.state_dict(),
            "model": self.task.model.state_dict(),
            "optimizer": self.task.optimizer.state_dict(),
            "compute_rng": self.pace.rng.bit_generator.state,
            "torch_rng": torch.get_rng_state(),
        }
        if self.task.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.task.device)
        return state

    def _load_state(self, state: dict[str, Any]) -> None:
        assert self.checkpoint is not None
        try:
            self.task.model.load_state_dict(state["model"])
            # The same count on all workers: what each of them knew of it differs by what was in flight.
            total_steps = self.checkpoint.total_steps(self.rank_info.workers)
            self.swarm.load_state_dict({**state["swarm"], "batches": total_steps})
            self.task.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise self._unfit(error) from None
        self._resumed_status = replace(self._resumed_status, **state["status"])
        self.pace.rng.bit_generator.state = state["compute_rng"]
        torch.set_rng_state(state["torch_rng"])
        if self.task.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self.task.device)

    def _load_average(self, checkpoint: Checkpoint) -> None:
        """Start from the mean of the workers in a checkpoint of another number of workers."""
        average = checkpoint.average()
        try:
            self.task.model.load_state_dict(average["model"])
            self.task.optimizer.load_state_dict(average["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise self._unfit(error) from None
        self._resumed_status = replace(self._resumed_status, seconds=average["status"]["seconds"])

    def _unfit(self, error: Exception) -> InputError:
        why = " ".join(str(error).split())
        path = self.job_spec.checkpoint
        return InputError(f"the checkpoint {path} is not of this model, method and optimizer: {why}")

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
        status, before, metrics = self.status, self._resumed_status, self.swarm.metrics()
        status.steps = self.steps_done - self._steps_without
        status.seconds = before.seconds + time.monotonic() - self._began
        status.step_s = self.step_meter.mean_s()
        status.idle_s, status.consensus = before.idle_s + metrics.idle_s, metrics.consensus
        loss_sum, loss_count = self.losses.sum_and_count()
        status.loss_sum, status.loss_count = before.loss_sum + loss_sum, before.loss_count + loss_count
        # Not at the end, where all workers leave.
        status.peers_alive = metrics.peers_alive
        self._measure_exchanges()

    def _measure_exchanges(self) -> None:
        """Update the counts of exchanges; until the end, since a worker that is done serves those that are not."""
        status, before, metrics = self.status, self._resumed_status, self.swarm.metrics()
        status.exchanges = before.exchanges + metrics.exchanges
        status.bytes_sent = before.bytes_sent + metrics.bytes_sent
        status.refused, status.lost = before.refused + metrics.refused, before.lost + metrics.lost


def _parameters(task: WorkerTask) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in task.model.parameters() if p.requires_grad])
