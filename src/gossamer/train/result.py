"""What a run of real workers came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gossamer.results import Point, Spread, WorkerPoint, to_json_data
from gossamer.train.status import WorkerStatus


@dataclass
class TrainingResult:
    """Like the result of a simulation, in real seconds, with every worker's own figures."""

    method: str
    topology: str
    workers: int
    seed: int
    final: Point
    final_workers: list[WorkerPoint]
    history: list[Point]
    reports: list[WorkerStatus]
    """The last of each worker."""
    gone: list[int]
    """Workers that were not there in the end."""
    events: list[str]
    interrupted: bool = False
    failed: str = ""
    """Why the run has no outcome; empty if it has."""
    ranks_diverged: list[int] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Whether there is anything to tell."""
        return self.final.total_steps > 0

    def document(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        head = {"method": self.method, "topology": self.topology, "workers": self.workers, "seed": self.seed}
        per_worker = {
            "worker_bytes_sent": [report.bytes_sent for report in self.reports],
            "worker_compute_time": [max(0.0, report.seconds - report.idle_s) for report in self.reports],
            "worker_idle_time": [report.idle_s for report in self.reports],
            "worker_reports": [_own_figures(report) for report in self.reports],
            "workers_gone": self.gone,
        }
        end: dict[str, Any] = {"events": self.events, "history": [asdict(point) for point in self.history]}
        if self.ranks_diverged:
            rank = self.ranks_diverged[0]
            step = self.reports[rank].diverged_at
            end["diverged"] = {"time": self.final.time, "worker": rank, "step": step}
        if self.failed:
            end["failed"] = self.failed
        return to_json_data({**head, **asdict(self.final), **per_worker, **end, "interrupted": self.interrupted})


def point_of(line: Mapping[str, Any]) -> Point:
    """A point of the history as it was kept."""
    spreads = {name: Spread(**line[name]) for name in ("worker_steps", "worker_accuracy")}
    return Point(**{**line, **spreads})


def _own_figures(report: WorkerStatus) -> dict[str, Any]:
    figures = asdict(report)
    figures["train_loss"] = report.mean_loss
    for name in ("events", "loss_sum", "loss_count", "loss", "accuracy"):
        del figures[name]
    return figures
