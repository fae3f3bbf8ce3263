"""The monitor of a run: reads the status of all workers, keeps the history, and makes the result of it.

It runs in the command that started the workers, or in one of the workers if a launcher such as torchrun started them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gossamer.process.roster.roster import Roster
from gossamer.report.view import View, WorkerRow, states_of
from gossamer.results import Point, Spread, WorkerPoint, to_json_data
from gossamer.runs.event_lines import EventLines
from gossamer.runs.status import DONE, FAILED, LEFT, STARTING, TRAINING, StatusBoard, WorkerStatus

POLL_S = 0.2

SILENT_S = 3.0
"""A worker without a new status for this long is shown as silent."""

NUM_POINTS = 500
"""About how many points the history of a long run has."""

OnPoint = Callable[[Point, Sequence[WorkerPoint]], None]
"""Called with every point of the history, and the same for each worker."""


@dataclass(frozen=True)
class RunFacts:
    """What the monitor has to know of a run."""

    method: str
    topology: str
    workers: int
    seed: int
    pairwise: bool
    """Whether its exchanges are pairwise, so that two workers count each of them."""
    steps: int = 0
    """Steps per worker to its end; 0: unknown."""
    batch: int = 0
    """Samples per mini-batch; 0: unknown, or there are none."""


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
    bad_input: bool = False
    """Whether it failed since something that the user gave cannot be used."""
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
    for name in ("events", "loss_sum", "loss_count", "loss", "accuracy", "num_evaluations", "resumed_at"):
        del document[name]
    for name in ("logged", "ranks"):
        if not document[name]:
            del document[name]
    return document


def read_point(line: Mapping[str, Any]) -> Point:
    spreads = {name: Spread(**line[name]) for name in ("worker_steps", "worker_accuracy")}
    return Point(**{**line, **spreads})


class RunMonitor:
    def __init__(
        self,
        facts: RunFacts,
        board: StatusBoard,
        on_point: OnPoint,
        history: Sequence[Point] = (),
        *,
        also_poll: Callable[[RunMonitor], list[str]] = lambda monitor: [],
        began: float | None = None,
    ) -> None:
        """``also_poll`` is called after each poll and returns events; ``began``: when the run began (monotonic)."""
        self.facts, self.board, self.on_point = facts, board, on_point
        self._also_poll = also_poll
        self.status: list[WorkerStatus] = []
        """By rank, also of workers that came later. A rank that was given to a process which did not come has left."""
        self.gone: dict[int, str] = {}
        """Workers that are dead, and why."""
        self.history = list(history)
        self.events: list[str] = []
        self._event_lines = EventLines()
        self._last_change: list[float] = []
        self._loss_sum_and_count = (0.0, 0)
        self._num_evaluations = 0
        """Evaluations of the averaged model that points have reported."""
        self._newest_losses: list[float | None] = []
        self._began = time.monotonic() if began is None else began
        self.roster = Roster(facts.workers)
        """Who belongs to the run now."""
        self._follow(self.roster)

    def _follow(self, roster: Roster) -> None:
        """Make room for workers that have come."""
        self.roster = roster = self.roster.merged(roster)
        for rank in range(len(self.status), roster.largest + 1):
            came = rank < roster.first or rank in roster.came
            self.status.append(WorkerStatus(rank, state=STARTING if came else LEFT))
            self._last_change.append(time.monotonic())
            self._newest_losses.append(None)

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
        roster = self.board.roster()
        if roster is not None:
            self._follow(roster)
        for rank, last in enumerate(self.status):
            status = self.board.get(rank)
            if status is None or status == last:
                continue
            if status.pid == last.pid and status.seconds < last.seconds:
                # A store that was used earlier and is used again still has it.
                continue
            self.status[rank], self._last_change[rank] = status, time.monotonic()
            newest = status.loss_since(last)
            if newest is not None:
                self._newest_losses[rank] = newest
            events += self._event_lines.read(rank, status.events)
        if self.started:
            self._observe()
            events += self._also_poll(self)
        self.events += events
        return events

    def take_over(self, known: Sequence[WorkerStatus | None]) -> None:
        """Continue from a status of each worker that an earlier monitor has reported already."""
        self._follow(Roster(self.facts.workers, frozenset(range(self.facts.workers, len(known)))))
        for rank, status in enumerate(known):
            if status is not None:
                self.status[rank] = status
                # That monitor has reported these.
                self._event_lines.read(rank, status.events)
        self._loss_sum_and_count = self._losses()
        self._num_evaluations = max(status.num_evaluations for status in self.status)

    def mark_gone(self, rank: int, why: str) -> str:
        """Note that worker ``rank`` is dead; return the event."""
        self.gone[rank] = why
        self._event_lines.saw_death(rank)
        remaining = sum(rank not in self.gone for rank in self.roster.ranks)
        event = f"worker {rank} gone ({why})" + (f"; going on with {remaining}" if remaining else "")
        self.events.append(event)
        return event

    def mark_restarted(self, rank: int) -> str:
        """Note that worker ``rank`` is there again; return the event."""
        self.gone.pop(rank, None)
        self._event_lines.saw_return(rank)
        self.events.append(f"worker {rank} started again")
        return self.events[-1]

    # Points of the history

    def _observe(self) -> None:
        point = self._point()
        newest = max(self.status, key=lambda status: status.num_evaluations)
        evaluated = newest.num_evaluations > self._num_evaluations
        if self.history and not evaluated:
            last = self.history[-1]
            new_steps = point.total_steps - last.total_steps
            if new_steps < self.facts.workers or point.time - last.time < point.time / NUM_POINTS:
                return
        if evaluated:
            self._num_evaluations = newest.num_evaluations
            point = replace(point, loss=newest.loss, accuracy=newest.accuracy)
        self._loss_sum_and_count = self._losses()
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
                logged=dict(status.logged),
            )
            for rank, status in enumerate(self.status)
        ]

    def _losses(self) -> tuple[float, int]:
        """Sum and number of the losses of all mini-batches so far."""
        return sum(status.loss_sum for status in self.status), sum(status.loss_count for status in self.status)

    def _point(self) -> Point:
        n = self.facts.workers
        total = sum(status.steps for status in self.status)
        losses = self._losses()
        gained = losses[1] - self._loss_sum_and_count[1]
        train_loss = (losses[0] - self._loss_sum_and_count[0]) / gained if gained > 0 else None
        accuracies = [status.own_accuracy for status in self.status if status.own_accuracy is not None]
        elapsed = max((status.seconds for status in self.status), default=0.0)
        alive = [self.status[rank] for rank in self.roster.ranks if rank not in self.gone]
        # Workers that came later, or have left for good, count for the time that they trained.
        stayed = set(range(n)) - self.roster.left
        of_all_s = sum(elapsed if status.rank in stayed else status.seconds for status in self.status)
        busy = sum(max(0.0, status.seconds - status.idle_s) for status in self.status)
        counts = [status.exchanges for status in self.status]
        squares = [status.consensus**2 for status in alive]
        return Point(
            time=elapsed,
            steps=round(total / n),
            total_steps=total,
            worker_steps=Spread.of([float(status.steps) for status in self.status]),
            samples=total * self.facts.batch,
            loss=None,
            train_loss=train_loss,
            accuracy=None,
            worker_accuracy=Spread.of(accuracies),
            consensus=math.sqrt(sum(squares) / len(squares)) if squares else 0.0,
            exchanges=round(sum(counts) / 2) if self.facts.pairwise else max(counts),
            bytes_sent=sum(status.bytes_sent for status in self.status),
            utilization=min(1.0, busy / of_all_s) if of_all_s else 1.0,
            workers_alive=len(alive),
            wall_s=time.monotonic() - self._began,
        )

    # The live view and the result

    def view(self) -> View:
        speeds = [status.steps / status.seconds if status.seconds else 0.0 for status in self.status]
        rows = [
            WorkerRow(rank, status.steps, speeds[rank], loss, status.exchanges, self._shown_state(rank, by_speed))
            for rank, (status, loss, by_speed) in enumerate(
                zip(self.status, self._newest_losses, states_of(speeds), strict=True)
            )
        ]
        last = self.history[-1] if self.history else None
        elapsed = max(status.seconds for status in self.status)
        total, facts = sum(status.steps for status in self.status), self.facts
        return View(
            time=elapsed,
            time_unit="s",
            wall_s=elapsed,
            share=min(1.0, total / (facts.steps * facts.workers)) if facts.steps else 0.0,
            train_loss=last.train_loss if last else None,
            accuracy=None,
            worker_accuracy=last.worker_accuracy.mean if last else None,
            consensus=last.consensus if last else None,
            rows=rows,
        )

    def _shown_state(self, rank: int, by_speed: str) -> str:
        state = self.status[rank].state
        if rank in self.gone:
            return "gone"
        if state in (DONE, STARTING, FAILED, LEFT):
            return state
        if self.silent_s[rank] > SILENT_S:
            return "silent"
        return by_speed

    def result(self, failed: str, bad_input: bool = False) -> TrainingResult:
        """Return the result of the run, once its workers have ended."""
        final = self._point()
        ended = [status for status in self.status if status.state == DONE and status.rank not in self.gone]
        evaluated = ended or [status for status in self.status if status.num_evaluations]
        if evaluated:
            newest = max(evaluated, key=lambda status: status.num_evaluations)
            final = replace(final, loss=newest.loss, accuracy=newest.accuracy)
        if self.history and final.train_loss is None:
            final = replace(final, train_loss=self.history[-1].train_loss)
        if self.history and self.history[-1].total_steps == final.total_steps:
            self.history[-1] = final
        else:
            self.history.append(final)
        diverged = [status.rank for status in self.status if status.diverged_at is not None]
        return TrainingResult(
            method=self.facts.method,
            topology=self.facts.topology,
            workers=self.facts.workers,
            seed=self.facts.seed,
            final=final,
            final_workers=self.worker_points(),
            history=self.history,
            status=self.status,
            gone=sorted(self.gone),
            events=self.events,
            # A worker that diverges asks the others to stop: that is no interruption.
            interrupted=not diverged and any(status.interrupted for status in self.status),
            failed=failed,
            bad_input=bad_input,
            ranks_diverged=diverged,
        )
