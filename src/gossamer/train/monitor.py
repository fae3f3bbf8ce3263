"""All workers of a run, as whoever watches them sees them: the command that started them, or rank 0."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gossamer.config import Run
from gossamer.errors import InputError
from gossamer.report.view import View, WorkerRow, state_of
from gossamer.results import Point, Spread, WorkerPoint
from gossamer.train.checkpoint import CheckpointKeeper, find_checkpoint
from gossamer.train.job_spec import JobSpec
from gossamer.train.result import TrainingResult
from gossamer.train.status import DONE, FAILED, STARTING, TRAINING, StatusBoard, WorkerStatus

LOOK_S = 0.2
"""How often one eval_schedule."""

SILENT_S = 3.0
"""A worker that has said nothing for so long is shown as silent."""

POINTS = 500
"""About how many points the history of a long run has."""


Keep = Callable[[Point, list[WorkerPoint]], None]
"""Called with every point of the history, and the same for each worker."""


class RunMonitor:
    """Follows a run over its status_board."""

    def __init__(
        self, run: Run, status_board: StatusBoard, job_spec: JobSpec, keep: Keep, history: Sequence[Point] = ()
    ) -> None:
        # ``keep`` is called with every point of the history.
        self.run, self.status_board, self.keep = run, status_board, keep
        n = run.config.workers
        self.reports = [WorkerStatus(rank) for rank in range(n)]
        self.gone: dict[int, str] = {}
        """Workers that are not there any more, and why."""
        self.history = list(history)
        self.events: list[str] = []
        self.keeper = CheckpointKeeper(job_spec.path, job_spec.checkpoint_every) if job_spec.path is not None else None
        self._every = 0 if run.method().lockstep else job_spec.checkpoint_every * n
        self._asked_for = 0
        if job_spec.checkpoint:
            resumed = find_checkpoint(Path(job_spec.checkpoint))
            self._asked_for = resumed.total_made(n) // max(1, self._every)
        self._cannot_keep = ""
        self._told = [0] * n
        self._heard = [time.monotonic()] * n
        self._losses = (0.0, 0)
        self._newest_losses: list[float | None] = [None] * n
        self._began = time.monotonic()

    @property
    def started(self) -> bool:
        """Whether the training has begun."""
        return any(report.state in (TRAINING, DONE) or report.seconds > 0 for report in self.reports)

    @property
    def silent_s(self) -> list[float]:
        """For how long each worker has said nothing."""
        return [time.monotonic() - heard for heard in self._heard]

    def look(self) -> list[str]:
        """Read what is new; returns what a person should hear of it."""
        fresh = []
        for rank, last in enumerate(self.reports):
            report = self.status_board.get(rank)
            if report is None or report == last:
                continue
            self.reports[rank], self._heard[rank] = report, time.monotonic()
            newest = report.loss_since(last)
            if newest is not None:
                self._newest_losses[rank] = newest
            if len(report.events) < self._told[rank]:
                # A worker that was restarted begins anew.
                self._told[rank] = 0
            fresh += [f"worker {rank}: {item}" for item in report.events[self._told[rank] :]]
            self._told[rank] = len(report.events)
        if self.started:
            self._observe()
            fresh += self._tend_checkpoints()
        self.events += fresh
        return fresh

    def lose(self, rank: int, why: str) -> str:
        """Worker ``rank`` is gone; returns what there is to say about it."""
        self.gone[rank] = why
        left = self.run.config.workers - len(self.gone)
        said = f"worker {rank} gone ({why}); going on with {left}" if left else f"worker {rank} gone ({why})"
        self.events.append(said)
        return said

    def regain(self, rank: int) -> None:
        """Worker ``rank`` was started again."""
        self.gone.pop(rank, None)
        self.events.append(f"worker {rank} started again")

    def _tend_checkpoints(self) -> list[str]:
        """Ask for one where workers do not wait for each other, and say which are complete."""
        total = sum(report.steps for report in self.reports)
        if self._every and total // self._every > self._asked_for:
            self._asked_for = total // self._every
            self.status_board.want_checkpoint(self._asked_for * self._every)
        try:
            if self.keeper is not None and not self._cannot_keep:
                self.keeper.look([report.rank for report in self.reports if report.rank not in self.gone])
        except InputError as error:
            self._cannot_keep = str(error)
            return [self._cannot_keep]
        return []

    # Points of the history

    def _observe(self) -> None:
        point = self._point()
        if not self.history:
            self._add(point)
            return
        last = self.history[-1]
        if point.total_steps >= last.total_steps + self.run.config.workers and (
            point.time - last.time >= point.time / POINTS
        ):
            self._add(point)

    def _add(self, point: Point) -> None:
        self.history.append(point)
        self.keep(point, self.worker_points())

    def worker_points(self) -> list[WorkerPoint]:
        """How far each worker is."""
        return [
            WorkerPoint(
                rank=rank,
                state="gone" if rank in self.gone else report.state,
                steps=report.steps,
                exchanges=report.exchanges,
                bytes_sent=report.bytes_sent,
                busy=max(0.0, 1.0 - report.idle_s / report.seconds) if report.seconds else 1.0,
                accuracy=report.own_accuracy,
            )
            for rank, report in enumerate(self.reports)
        ]

    def _point(self) -> Point:
        reports, n = self.reports, self.run.config.workers
        total = sum(report.steps for report in reports)
        sums = (sum(report.loss_sum for report in reports), sum(report.loss_count for report in reports))
        gained = sums[1] - self._losses[1]
        train_loss = (sums[0] - self._losses[0]) / gained if gained > 0 else None
        self._losses = sums if gained > 0 else self._losses
        own = [report.own_accuracy for report in reports if report.own_accuracy is not None]
        elapsed = max((report.seconds for report in reports), default=0.0)
        alive = [report for report in reports if report.rank not in self.gone]
        busy = sum(max(0.0, report.seconds - report.idle_s) for report in reports)
        squares = [report.consensus**2 for report in alive]
        return Point(
            time=elapsed,
            steps=round(total / n),
            total_steps=total,
            worker_steps=Spread.of([float(report.steps) for report in reports]),
            samples=total * self.run.config.batch if self.run.task.gradients else 0,
            loss=None,
            train_loss=train_loss,
            accuracy=None,
            worker_accuracy=Spread.of(own),
            consensus=math.sqrt(sum(squares) / len(squares)) if squares else 0.0,
            exchanges=self._exchanges(),
            bytes_sent=sum(report.bytes_sent for report in reports),
            utilization=min(1.0, busy / (n * elapsed)) if elapsed else 1.0,
            workers_alive=len(alive),
            wall_s=time.monotonic() - self._began,
        )

    def _exchanges(self) -> int:
        counts = [report.exchanges for report in self.reports]
        return round(sum(counts) / 2) if self.run.method().pairwise else max(counts)

    # What is shown, and what it came to

    def view(self) -> View:
        c = self.run.config
        speeds = [report.steps / report.seconds if report.seconds else 0.0 for report in self.reports]
        rows = [
            WorkerRow(rank, report.steps, speeds[rank], loss, report.exchanges, self._state(rank, speeds))
            for rank, (report, loss) in enumerate(zip(self.reports, self._newest_losses, strict=True))
        ]
        last = self.history[-1] if self.history else None
        elapsed = max(report.seconds for report in self.reports)
        total = sum(report.steps for report in self.reports)
        return View(
            time=elapsed,
            time_unit="s",
            wall_s=elapsed,
            share=min(1.0, total / (c.steps * c.workers)),
            train_loss=last.train_loss if last else None,
            accuracy=last.worker_accuracy.mean if last else None,
            consensus=last.consensus if last else None,
            rows=rows,
        )

    def _state(self, rank: int, speeds: list[float]) -> str:
        report = self.reports[rank]
        if rank in self.gone:
            return "gone"
        if report.state in (DONE, STARTING, FAILED):
            return report.state
        if self.silent_s[rank] > SILENT_S:
            return "silent"
        return state_of(speeds[rank], speeds)

    def result(self, failed: str) -> TrainingResult:
        """What the run came to, once its workers have ended."""
        final = self._point()
        ended = [report for report in self.reports if report.state == DONE and report.rank not in self.gone]
        if ended:
            final = replace(final, loss=ended[0].loss, accuracy=ended[0].accuracy)
        if self.history and final.train_loss is None:
            final = replace(final, train_loss=self.history[-1].train_loss)
        if self.history and self.history[-1].total_steps == final.total_steps:
            self.history[-1] = final
        else:
            self.history.append(final)
        c = self.run.config
        diverged = [report.rank for report in self.reports if report.diverged_at is not None]
        return TrainingResult(
            method=c.method,
            topology=self.run.topology.name,
            workers=c.workers,
            seed=c.seed,
            final=final,
            final_workers=self.worker_points(),
            history=self.history,
            reports=self.reports,
            gone=sorted(self.gone),
            events=self.events,
            # Who diverges asks the others to stop.
            interrupted=not diverged and any(report.interrupted for report in self.reports),
            failed=failed,
            ranks_diverged=diverged,
        )
