"""Adds workers of this machine to a run of ``gossamer train`` that is under way, here or on another machine."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from gossamer.process.roster.newcomer import Newcomer
from gossamer.process.store.rank_info import RankInfo
from gossamer.runs.monitor import RunMonitor, TrainingResult
from gossamer.runs.run_folder import WORKERS
from gossamer.runs.status import StatusBoard
from gossamer.train.entrypoint import worker_main
from gossamer.train.job_spec import JobSpec
from gossamer.train.launcher import LocalWorkers, StopSignals
from gossamer.train.newcomers.newcomer_job import read_job
from gossamer.train.supervisor import Show, run_facts, supervise

BEGIN_TIMEOUT_S = 300.0
"""How long the run may take to begin."""


class JoinedRun:
    """A run to which workers come: its job, and their ranks."""

    def __init__(self, at: str, count: int, own: dict[str, Any]) -> None:
        """``own``: settings that this machine has in place of the run's. InputError if the workers cannot come."""
        newcomers: list[Newcomer] = []
        try:
            newcomers.append(Newcomer(at, None, BEGIN_TIMEOUT_S, prefix=lambda run: ""))
            job_spec = read_job(newcomers[0].job)
            self.job_spec = JobSpec(**{**vars(job_spec), "values": {**job_spec.values, **own}})
            self.run = self.job_spec.run()
            newcomers += [Newcomer(at, None, BEGIN_TIMEOUT_S, prefix=lambda run: "") for _ in range(1, count)]
            # Nothing is wrong here: from now on there are ranks of ours.
            self.rank_infos: list[RankInfo] = [newcomer.take_rank() for newcomer in newcomers]
        finally:
            for newcomer in newcomers:
                newcomer.close()

    def train(self, signals: StopSignals, show: Show, restart: bool) -> TrainingResult:
        """Train with the workers that have come, until all of them have ended."""
        board = StatusBoard(self.rank_infos[0].connect_store())
        monitor = RunMonitor(run_facts(self.run), board, lambda point, workers: None)
        with tempfile.TemporaryDirectory(prefix="gossamer-") as scratch:
            logs = (self.job_spec.path or Path(scratch)) / WORKERS
            target = partial(worker_main, self.job_spec.to_json())
            with LocalWorkers(target, self.rank_infos, logs) as workers:
                failure = supervise(workers, monitor, signals, show, restart)
        monitor.poll()
        board.close()
        return monitor.result(*failure)
