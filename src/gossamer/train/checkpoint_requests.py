"""The monitor's part in checkpoints: it requests them of workers without a common step, and marks complete ones."""

from __future__ import annotations

from pathlib import Path

from gossamer.config import Run
from gossamer.errors import InputError
from gossamer.runs.monitor import RunMonitor
from gossamer.train.checkpoint import CheckpointKeeper, Layout, find_checkpoint
from gossamer.train.job_spec import JobSpec


class CheckpointRequests:
    def __init__(self, run: Run, job_spec: JobSpec) -> None:
        n = run.config.workers
        self._keeper = None
        if job_spec.path is not None:
            c = run.config
            self._keeper = CheckpointKeeper(job_spec.path, job_spec.checkpoint_every, c.replica_size, c.inside)
        self._every = 0 if run.method().lockstep else job_spec.checkpoint_every * n
        """Steps of all workers together between two checkpoints that have to be requested."""
        self._num_requested = 0
        if job_spec.checkpoint:
            resumed = find_checkpoint(Path(job_spec.checkpoint))
            self._num_requested = resumed.total_steps(Layout.of(job_spec.values)) // max(1, self._every)

    def poll(self, monitor: RunMonitor) -> list[str]:
        """Request a checkpoint if one is due, and mark those that are complete; return events."""
        total = sum(status.steps for status in monitor.status)
        if self._every and total // self._every > self._num_requested:
            self._num_requested = total // self._every
            monitor.board.request_checkpoint(self._num_requested * self._every)
        try:
            if self._keeper is not None:
                self._keeper.poll([rank for rank in monitor.roster.ranks if rank not in monitor.gone])
        except InputError as error:
            self._keeper = None
            return [str(error)]
        return []
