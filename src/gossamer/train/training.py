"""One worker's part in a run, from joining the others to its last report."""

from __future__ import annotations

import itertools
import json
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
from gossamer.process.store.rank_info import RankInfo
from gossamer.results import to_json_data
from gossamer.runfolder import CHECKPOINTS, WORKERS, save_model
from gossamer.seeds import stream
from gossamer.train.checkpoint import Checkpoint, find_checkpoint, worker_file
from gossamer.train.eval_schedule import EvalSchedule
from gossamer.train.job_spec import JobSpec
from gossamer.train.pace import Pace, StepMeter
from gossamer.train.recording_files import open_recording
from gossamer.train.state_file import write_state
from gossamer.train.status import DONE, TRAINING, StatusBoard, WorkerStatus
from gossamer.train.stop_coordinator import StopCoordinator
from gossamer.train.worker_task import LossMeter, WorkerTask
from gossamer.vector_math import distance

TELL_S = 0.2
"""How often a worker reports, beside its training."""

LINE_S = 1.0
"""The least time between two lines of a worker's own metrics; long runs take them further apart."""

ROUNDING = 1e-6
"""How far the mean of models that are alike may be from them, relative to their length."""

CUMULATIVE = ("seconds", "idle_s", "loss_sum", "loss_count", "exchanges", "bytes_sent", "lost", "refused")
"""Figures of a worker that go on where they were when a run is resumed."""

HOPELESS = 10
"""So many losses in a row that are not finite: nobody's weights have helped."""


class Training:
    """What one worker does in one run."""

    def __init__(
        self,
        job_spec: JobSpec,
        run: Run,
        rank_info: RankInfo,
        status_board: StatusBoard,
        stop_coordinator: StopCoordinator,
        orphaned: Callable[[], bool],
    ):
        self.job_spec, self.run, self.rank_info, self.status_board, self.stop_coordinator = (
            job_spec,
            run,
            rank_info,
            status_board,
            stop_coordinator,
        )
        self._orphaned = orphaned
        self.before = WorkerStatus(rank_info.rank)
        """What this worker had done when the run was resumed."""
        earlier = status_board.get(rank_info.rank)
        self.made_before = 0 if earlier is None else earlier.steps
        """Steps that a process made which was this worker before it died."""
        self.report = WorkerStatus(rank_info.rank, steps=self.made_before)
        self.job = WorkerTask(run, rank_info.rank)
        self.checkpoint: Checkpoint | None = None
        if job_spec.checkpoint:
            self.checkpoint = find_checkpoint(Path(job_spec.checkpoint))
        c = run.config
        rng = stream(c.seed, "compute", rank_info.rank)
        self.pace = Pace(job_spec.compute(c.workers), job_spec.waits, rank_info.rank, rng, stop_coordinator.asked)
        method = run.method()
        self.meter = StepMeter(max(1, getattr(method, "period", 1)))
        self.losses = LossMeter(self.job.device)
        self.eval_schedule = EvalSchedule(c.eval_every, c.workers)
        self.lockstep = method.lockstep
        self._saved = 0
        self._wanted = 0
        self.swarm: Swarm | None = None
        self.recording = open_recording(job_spec.path, rank_info.rank, job_spec.trace)
        self._began = 0.0
        self._trained = False
        self._measuring = threading.Lock()
        self._ended = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="gossamer-tell", daemon=True)
        self.events: list[str] = []
        self._next_line_s = 0.0

    # The training itself

    def whole(self) -> WorkerStatus:
        """Join, train, average, look at the outcome; returns the last report, which is on the status_board too."""
        self.status_board.put(self.report)
        if self.checkpoint is not None and not self.goes_on:
            self._start_from_average(self.checkpoint)
        swarm = self.swarm = Swarm(
            self.job.model,
            self.job.optimizer,
            self.run.method(),
            self.run.topology,
            self.rank_info,
            self.run.config.seed,
            recorder=self.recording.recorder if self.recording is not None else None,
        )
        if self.recording is not None:
            self.recording.began(swarm.step_recorder.began_ns, swarm.step_recorder.now())
        try:
            if self.checkpoint is None:
                self._start_apart()
            elif self.goes_on:
                self._go_on(self.checkpoint.state(self.rank_info.rank))
            self._began = time.monotonic()
            self.report.state = TRAINING
            self._teller.start()
            for _ in self._turns():
                number = self.made
                if not self.stop_coordinator.passes(number):
                    break
                self._step(number)
                self._save_if_due()
            self._end(swarm)
        except BaseException:
            if self._began:
                self._measure()
            swarm.close()
            raise
        finally:
            # What it has to say last must not come after, and in place of, how this ended.
            self._ended.set()
            if self._teller.is_alive():
                self._teller.join()
        self._say()
        return self.report

    @property
    def goes_on(self) -> bool:
        """Whether this worker goes on as the one that it was in the checkpoint."""
        return self.checkpoint is not None and self.checkpoint.fits(self.rank_info.workers) and not self.made_before

    @property
    def made(self) -> int:
        """The steps of this worker so far, those before a restart or before the run was resumed included."""
        assert self.swarm is not None
        if self.made_before and not self.lockstep:
            return self.swarm.worker.step + self.made_before
        started_anew = self.checkpoint is not None and not self.checkpoint.fits(self.rank_info.workers)
        earlier = self.checkpoint.mean_made() if self.checkpoint is not None and started_anew else 0
        return self.swarm.worker.step + earlier

    def _turns(self) -> Iterator[None]:
        """One per step that this worker shall make."""
        assert self.swarm is not None
        c = self.run.config
        if not self.lockstep:
            # A worker that goes on has told the swarm what was made before; to one that starts anew it is new.
            earlier = 0 if self.checkpoint is None or self.goes_on else self.checkpoint.total_made(c.workers)
            yield from self.swarm.batches(itertools.repeat(None), total_steps=c.steps * c.workers - earlier)
        while self.lockstep and self.made < c.steps:
            yield None

    def _step(self, number: int) -> None:
        began = time.monotonic()
        loss = self.job.gradient(number)
        if loss is not None:
            self.losses.add(loss)
            if self.eval_schedule.guessing:
                self.job.settle()
                # Looking is about a third of a gradient.
                self.eval_schedule.expect(began, (time.monotonic() - began) * self.job.test_batches / 3)
        if not self.pace.natural:
            self.job.settle()
            self.pace.keep(began)
        self.job.update(number)
        self.meter.add(time.monotonic())
        if self.made > number:
            self._look_if_due()

    def _look_if_due(self) -> None:
        began = time.monotonic()
        if self.eval_schedule.due(began, self.made):
            # A model may draw random numbers also when it is looked at: those of the training stay what they are.
            with torch.random.fork_rng([self.job.device] if self.job.device.type == "cuda" else []):
                self.report.own_loss, self.report.own_accuracy = self.job.scores()
            now = time.monotonic()
            self.eval_schedule.took(now, now - began)

    def _start_apart(self) -> None:
        """Tasks may start every worker from a place of its own: move there from where all are."""
        task = self.run.task
        if task.start is not None and self.swarm is not None:
            away = torch.as_tensor(
                task.start(self.rank_info.rank, stream(self.run.config.seed, "start", self.rank_info.rank))
            )
            with self.swarm.state.lock:
                x = self.swarm.flat_model.x
                self.swarm.flat_model.load_weights(x.add_(away.to(x)))

    # Checkpoints

    def _save_if_due(self) -> None:
        """Where workers wait for each other at the same step for all, elsewhere when they are asked to."""
        every, workers = self.job_spec.checkpoint_every, self.rank_info.workers
        if self.lockstep and every and self.made % every == 0:
            self._save(self.made * workers)
        elif not self.lockstep and self._wanted > self._saved:
            self._save(self._wanted)

    def _save_last(self) -> None:
        """The run was stopped: keep where it is."""
        told = [self.status_board.get(rank) for rank in range(self.rank_info.workers)]
        total = self.made * self.rank_info.workers if self.lockstep else sum(report.steps for report in told if report)
        self._save(self.status_board.agree("last checkpoint", total))

    def _save(self, total_made: int) -> None:
        """Write this worker's part of the checkpoint of that name; a full disk is no reason to stop training."""
        folder = self.job_spec.path
        if folder is None or total_made <= self._saved:
            return
        self._saved = total_made
        path = worker_file(folder / CHECKPOINTS / str(total_made), self.rank_info.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_state(path, self._state(), self.made)
        except OSError as error:
            self.events.append(f"no checkpoint after {total_made} steps: {error.strerror}; training goes on")

    def _state(self) -> dict[str, Any]:
        """Everything that this worker is."""
        assert self.swarm is not None
        with self._measuring:
            self._measure()
            report = asdict(self.report)
        state = {
            "report": {name: report[name] for name in CUMULATIVE},
            "swarm": self.swarm.state_dict(),
            "model": self.job.model.state_dict(),
            "optimizer": self.job.optimizer.state_dict(),
            "compute_rng": self.pace.rng.bit_generator.state,
            "torch_rng": torch.get_rng_state(),
        }
        if self.job.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.job.device)
        return state

    def _go_on(self, state: dict[str, Any]) -> None:
        """Be what this worker was."""
        assert self.swarm is not None
        assert self.checkpoint is not None
        try:
            self.job.model.load_state_dict(state["model"])
            # The same count for all: what each of them saw of it differs by what was under way.
            self.swarm.load_state_dict(
                {**state["swarm"], "batches": self.checkpoint.total_made(self.rank_info.workers)}
            )
            self.job.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise self._unfit(error) from None
        self.before = replace(self.before, **state["report"])
        self.pace.rng.bit_generator.state = state["compute_rng"]
        torch.set_rng_state(state["torch_rng"])
        if self.job.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self.job.device)

    def _start_from_average(self, checkpoint: Checkpoint) -> None:
        """There were other workers than now: all start from the mean of what those had."""
        average = checkpoint.average()
        try:
            self.job.model.load_state_dict(average["model"])
            self.job.optimizer.load_state_dict(average["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise self._unfit(error) from None
        self.before = replace(self.before, seconds=average["report"]["seconds"])

    def _unfit(self, error: Exception) -> InputError:
        why = " ".join(str(error).split())
        return InputError(
            f"the checkpoint {self.job_spec.checkpoint} is not of this model, method and optimizer: {why}"
        )

    def _end(self, swarm: Swarm) -> None:
        """The last average, and what the test set says before and after it."""
        self.job.settle()
        self.report.interrupted = self.stop_coordinator.asked.is_set() and self.report.diverged_at is None
        if self.report.interrupted:
            self._save_last()
        with self._measuring:
            self._measure()
            self._trained = True
        self.report.own_loss, self.report.own_accuracy = self.job.scores()
        own = _vector(self.job)
        swarm.finish()
        self._count()
        self.report.consensus = _distance(own, _vector(self.job))
        self.report.loss, self.report.accuracy = self.job.scores()
        self.report.state = DONE
        folder = self.job_spec.path
        if folder is not None and self.status_board.agree("model", self.rank_info.rank) == self.rank_info.rank:
            try:
                save_model(folder, self.job.weights(), self._facts())
            except InputError as error:
                self.report.error = str(error)

    def _facts(self) -> dict[str, str]:
        c = self.run.config
        facts = {"method": c.method, "topology": c.topology, "workers": c.workers, "seed": c.seed, "steps": c.steps}
        return {name: str(value) for name, value in facts.items()}

    # Beside the training

    def _tell(self) -> None:
        assert self.swarm is not None
        while not self._ended.wait(TELL_S if not self.stop_coordinator.asked.is_set() else 0.02):
            if self._orphaned():
                self.stop_coordinator.asked.set()
            with self._measuring:
                if not self._trained:
                    self._measure()
            if self.losses.bad_in_a_row() >= HOPELESS and self.report.diverged_at is None:
                self.report.diverged_at = self.made
                self.stop_coordinator.asked.set()
            self._put()
            self._line()
            self._record()
            self._wanted = max(self._wanted, self.status_board.wanted_checkpoint())
            self.stop_coordinator.poll(self.status_board, self._gone)

    def _gone(self, rank: int) -> bool:
        """Whether a worker takes part in nothing any more."""
        assert self.swarm is not None
        said = self.status_board.get(rank)
        return self.swarm.heartbeats.dead(rank) or (said is not None and said.state == DONE)

    def _measure(self) -> None:
        """Bring the report up to date; only while training, since the end has figures of its own."""
        assert self.swarm is not None
        report, before, metrics = self.report, self.before, self.swarm.metrics()
        report.steps, report.seconds = self.made, before.seconds + time.monotonic() - self._began
        report.step_s = self.meter.mean_s()
        report.idle_s, report.consensus = before.idle_s + metrics.idle_s, metrics.consensus
        loss_sum, loss_count = self.losses.sum_and_count()
        report.loss_sum, report.loss_count = before.loss_sum + loss_sum, before.loss_count + loss_count
        # In the end everybody leaves: what breaks then was not lost.
        report.lost, report.peers_alive = before.lost + metrics.lost, metrics.peers_alive
        self._count()

    def _count(self) -> None:
        """What was exchanged so far; this goes on until the end, since who is done serves those that are not."""
        assert self.swarm is not None
        report, before, metrics = self.report, self.before, self.swarm.metrics()
        report.exchanges = before.exchanges + metrics.exchanges
        report.bytes_sent = before.bytes_sent + metrics.bytes_sent
        report.refused = before.refused + metrics.refused

    def _line(self) -> None:
        """Add a line to this worker's own metrics, now and then."""
        if self.report.seconds >= self._next_line_s:
            self._next_line_s = self.report.seconds + max(LINE_S, self.report.seconds / 200)
            self._write_line()

    def _write_line(self) -> None:
        folder = self.job_spec.path
        if folder is None:
            return
        line = {name: value for name, value in asdict(self.report).items() if name != "events"}
        path = folder / WORKERS / f"{self.rank_info.rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(to_json_data(line)) + "\n")
        except OSError as error:
            self._tell_once(f"{path} cannot be written to: {error.strerror}; training goes on")

    def _record(self, ended: bool = False) -> None:
        """Renew the recording."""
        if self.recording is None or self.swarm is None:
            return
        try:
            self.recording.write(self.swarm.step_recorder.now(), ended)
        except (OSError, InputError) as error:
            self.recording = None
            self._tell_once(f"{error}; training goes on")

    def _tell_once(self, events: str) -> None:
        if events not in self.events:
            self.events.append(events)

    def _say(self) -> None:
        """The last word."""
        self._write_line()
        self._record(ended=True)
        self._put()

    def _put(self) -> None:
        assert self.swarm is not None
        self.report.events = [*self.swarm.events, *self.events]
        self.status_board.put(self.report)


def _vector(job: WorkerTask) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in job.model.parameters() if p.requires_grad])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far apart two models are; 0 for those that are alike up to the rounding of a mean."""
    apart = distance(a, b)
    return apart if apart > ROUNDING * float(torch.linalg.vector_norm(b)) else 0.0
