"""The monitor of a run: reads the status of all workers, keeps the history, and makes the result of it.

It runs in the command that started the workers, or in rank 0 if a launcher such as torchrun started them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gossamer.config import Run
from gossamer.errors import InputError
from gossamer.report.view import View, WorkerRow, state_of
from gossamer.results import Point, Spread, WorkerPoint, to_json_data
from gossamer.train.checkpoint import CheckpointKeeper, find_checkpoint
from gossamer.train.event_lines import EventLines
from gossamer.train.job_spec import JobSpec
from gossamer.train.status import DONE, FAILED, STARTING, TRAINING, StatusBoard, WorkerStatus

POLL_S = 0.2

SILENT_S = 3.0
"""A worker without a new status for this long is shown as silent."""

NUM_POINTS = 500
"""About how many points the history of a long run has."""

OnPoint = Callable[[Point, list[WorkerPoint]], None]
"""Called with every point of the history, and the same for each worker."""


@dataclass
class TrainingResult:
    """The result of a run with real workers: that of a simulation in real seconds, and every worker's last status."""

    method: str
    topology: str
    workers: int
    seed: int
    final: Point
    final_workers: list[WorkerPoint]
    history: list[Point]
    status: list[WorkerStatus]
    gone: list[int]
    """Workers that were not alive at the end."""
    events: list[str]
    interrupted: bool = False
    failed: str = ""
    """Why the run has no outcome; empty if it has one."""
    ranks_diverged: list[int] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        return self.final.total_steps > 0

    def document(self) -> dict[str, Any]:
        head = {"method": self.method, "topology": self.topology, "workers": self.workers, "seed": self.seed}
        per_worker = {
            "worker_bytes_sent": [status.bytes_sent for status in self.status],
            "worker_compute_time": [max(0.0, status.seconds - status.idle_s) for status in self.status],
            "worker_idle_time": [status.idle_s for status in self.status],
            "worker_status": [_status_document(status) for status in self.status],
            "workers_gone": self.gone,
        }
        end: dict[str, Any] = {"events": self.events, "history": [asdict(point) for point in self.history]}
        if self.ranks_diverged:
            rank = self.ranks_diverged[0]
            step = self.status[rank].diverged_at
            end["diverged"] = {"time": self.final.time, "worker": rank, "step": step}
        if self.failed:
            end["failed"] = self.failed
        return to_json_data({**head, **asdict(self.final), **per_worker, **end, "interrupted": self.interrupted})


def _status_document(status: WorkerStatus) -> dict[str, Any]:
    document = asdict(status)
    document["train_loss"] = status.mean_loss
    for name in ("events", "loss_sum", "loss_count", "loss", "accuracy"):
        del document[name]
    return document


def read_point(line: Mapping[str, Any]) -> Point:
    spreads = {name: Spread(**line[name]) for name in ("worker_steps", "worker_accuracy")}
    return Point(**{**line, **spreads})


class RunMonitor:
    def __init__(
        self, run: Run, board: StatusBoard, job_spec: JobSpec, on_point: OnPoint, history: Sequence[Point] = ()
    ) -> None:
        self.run, self.board, self.on_point = run, board, on_point
        n = run.config.workers
        self.status = [WorkerStatus(rank) for rank in range(n)]
        self.gone: dict[int, str] = {}
        """Workers that are dead, and why."""
        self.history = list(history)
        self.events: list[str] = []
        self.keeper = CheckpointKeeper(job_spec.path, job_spec.checkpoint_every) if job_spec.path is not None else None
        self._checkpoint_every = 0 if run.method().lockstep else job_spec.checkpoint_every * n
        """Steps of all workers together between two checkpoints that the monitor has to request."""
        self._num_requested = 0
        if job_spec.checkpoint:
            resumed = find_checkpoint(Path(job_spec.checkpoint))
            self._num_requested = resumed.total_steps(n) // max(1, self._checkpoint_every)
        self._keeper_error = ""
        self._event_lines = EventLines(n)
        self._last_change = [time.monotonic()] * n
        self._loss_sum_and_count = (0.0, 0)
        self._newest_losses: list[float | None] = [None] * n
        self._began = time.monotonic()

    @property
    def started(self) -> bool:
        return any(status.state in (TRAINING, DONE) or status.seconds > 0 for status in self.status)

    @property
    def silent_s(self) -> list[float]:
        """For how long the status of each worker has not changed."""
        return [time.monotonic() - changed for changed in self._last_change]

    def poll(self) -> list[str]:
        """Read new status of all workers; return the events in it."""
        events = []
        for rank, last in enumerate(self.status):
            status = self.board.get(rank)
            if status is None or status == last:
                continue
            self.status[rank], self._last_change[rank] = status, time.monotonic()
            newest = status.loss_since(last)
            if newest is not None:
                self._newest_losses[rank] = newest
            events += self._event_lines.read(rank, status.events)
        if self.started:
            self._observe()
            events += self._poll_checkpoints()
        self.events += events
        return events

    def mark_gone(self, rank: int, why: str) -> str:
        """Note that worker ``rank`` is dead; return the event."""
        self.gone[rank] = why
        self._event_lines.saw_death(rank)
        remaining = self.run.config.workers - len(self.gone)
        event = f"worker {rank} gone ({why})" + (f"; going on with {remaining}" if remaining else "")
        self.events.append(event)
        return event

    def mark_restarted(self, rank: int) -> None:
        self.gone.pop(rank, None)
        self._event_lines.saw_return(rank)
        self.events.append(f"worker {rank} started again")

    def _poll_checkpoints(self) -> list[str]:
        """Request a checkpoint if one is due, and mark those that are complete; return events."""
        total = sum(status.steps for status in self.status)
        if self._checkpoint_every and total // self._checkpoint_every > self._num_requested:
            self._num_requested = total // self._checkpoint_every
            self.board.request_checkpoint(self._num_requested * self._checkpoint_every)
        try:
            if self.keeper is not None and not self._keeper_error:
                self.keeper.poll([status.rank for status in self.status if status.rank not in self.gone])
        except InputError as error:
            self._keeper_error = str(error)
            return [self._keeper_error]
        return []

    # Points of the history

    def _observe(self) -> None:
        point = self._point()
        if self.history:
            last = self.history[-1]
            new_steps = point.total_steps - last.total_steps
            if new_steps < self.run.config.workers or point.time - last.time < point.time / NUM_POINTS:
                return
        self.history.append(point)
        self.on_point(point, self.worker_points())

    def worker_points(self) -> list[WorkerPoint]:
        return [
            WorkerPoint(
                rank=rank,
                state="gone" if rank in self.gone else status.state,
                steps=status.steps,
                exchanges=status.exchanges,
                bytes_sent=status.bytes_sent,
                busy=max(0.0, 1.0 - status.idle_s / status.seconds) if status.seconds else 1.0,
                accuracy=status.own_accuracy,
            )
            for rank, status in enumerate(self.status)
        ]

    def _point(self) -> Point:
        n = self.run.config.workers
        total = sum(status.steps for status in self.status)
        losses = (sum(status.loss_sum for status in self.status), sum(status.loss_count for status in self.status))
        gained = losses[1] - self._loss_sum_and_count[1]
        train_loss = (losses[0] - self._loss_sum_and_count[0]) / gained if gained > 0 else None
        self._loss_sum_and_count = losses if gained > 0 else self._loss_sum_and_count
        accuracies = [status.own_accuracy for status in self.status if status.own_accuracy is not None]
        elapsed = max((status.seconds for status in self.status), default=0.0)
        alive = [status for status in self.status if status.rank not in self.gone]
        busy = sum(max(0.0, status.seconds - status.idle_s) for status in self.status)
        counts = [status.exchanges for status in self.status]
        squares = [status.consensus**2 for status in alive]
        return Point(
            time=elapsed,
            steps=round(total / n),
            total_steps=total,
            worker_steps=Spread.of([float(status.steps) for status in self.status]),
            samples=total * self.run.config.batch if self.run.task.gradients else 0,
            loss=None,
            train_loss=train_loss,
            accuracy=None,
            worker_accuracy=Spread.of(accuracies),
            consensus=math.sqrt(sum(squares) / len(squares)) if squares else 0.0,
            exchanges=round(sum(counts) / 2) if self.run.method().pairwise else max(counts),
            bytes_sent=sum(status.bytes_sent for status in self.status),
            utilization=min(1.0, busy / (n * elapsed)) if elapsed else 1.0,
            workers_alive=len(alive),
            wall_s=time.monotonic() - self._began,
        )

    # The live view and the result

    def view(self) -> View:
        c = self.run.config
        speeds = [status.steps / status.seconds if status.seconds else 0.0 for status in self.status]
        rows = [
            WorkerRow(rank, status.steps, speeds[rank], loss, status.exchanges, self._shown_state(rank, speeds))
            for rank, (status, loss) in enumerate(zip(self.status, self._newest_losses, strict=True))
        ]
        last = self.history[-1] if self.history else None
        elapsed = max(status.seconds for status in self.status)
        total = sum(status.steps for status in self.status)
        return View(
            time=elapsed,
            time_unit="s",
            wall_s=elapsed,
            share=min(1.0, total / (c.steps * c.workers)),
            train_loss=last.train_loss if last else None,
            accuracy=None,
            worker_accuracy=last.worker_accuracy.mean if last else None,
            consensus=last.consensus if last else None,
            rows=rows,
        )

    def _shown_state(self, rank: int, speeds: list[float]) -> str:
        state = self.status[rank].state
        if rank in self.gone:
            return "gone"
        if state in (DONE, STARTING, FAILED):
            return state
        if self.silent_s[rank] > SILENT_S:
            return "silent"
        return state_of(speeds[rank], speeds)

    def result(self, failed: str) -> TrainingResult:
        """Return the result of the run, once its workers have ended."""
        final = self._point()
        ended = [status for status in self.status if status.state == DONE and status.rank not in self.gone]
        if ended:
            final = replace(final, loss=ended[0].loss, accuracy=ended[0].accuracy)
        if self.history and final.train_loss is None:
            final = replace(final, train_loss=self.history[-1].train_loss)
        if self.history and self.history[-1].total_steps == final.total_steps:
            self.history[-1] = final
        else:
            self.history.append(final)
        c = self.run.config
        diverged = [status.rank for status in self.status if status.diverged_at is not None]
        return TrainingResult(
            method=c.method,
            topology=self.run.topology.name,
            workers=c.workers,
            seed=c.seed,
            final=final,
            final_workers=self.worker_points(),
            history=self.history,
            status=self.status,
            gone=sorted(self.gone),
            events=self.events,
            # A worker that diverges asks the others to stop: that is no interruption.
            interrupted=not diverged and any(status.interrupted for status in self.status),
            failed=failed,
            ranks_diverged=diverged,
        )
