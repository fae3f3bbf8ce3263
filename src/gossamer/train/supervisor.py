"""Runs a job to its result: with workers started on this machine, or as one of the workers that a launcher started."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from gossamer.config import Run
from gossamer.process.store.rank_info import RankInfo
from gossamer.report.view import View
from gossamer.results import Point
from gossamer.runfolder import WORKERS
from gossamer.train.entrypoint import run_worker, worker_main
from gossamer.train.job_spec import JobSpec
from gossamer.train.launcher import BAD_INPUT, LocalStore, LocalWorkers, StopSignals, describe_exit
from gossamer.train.monitor import POLL_S, OnPoint, RunMonitor, TrainingResult
from gossamer.train.status import DONE, FAILED, StatusBoard

MAX_RESTARTS = 3
"""How often one worker is started again."""

LAST_STATUS_S = 30.0
"""How long rank 0 waits for the others' last status, which comes right after the final average."""

Show = Callable[[View, list[str]], None]
"""Called with how far the run is, and the events since the last call."""


def train_locally(
    job_spec: JobSpec,
    run: Run,
    store: LocalStore,
    signals: StopSignals,
    show: Show,
    on_point: OnPoint,
    restart: bool,
    history: Sequence[Point] = (),
) -> TrainingResult:
    method = run.config.method
    board = StatusBoard(store.connect(method))
    monitor = RunMonitor(run, board, job_spec, on_point, history)
    target = partial(worker_main, job_spec.to_json())
    scratch = tempfile.TemporaryDirectory(prefix="gossamer-") if job_spec.path is None else nullcontext("")
    with scratch as folder:
        logs = job_spec.path / WORKERS if job_spec.path is not None else Path(folder) / WORKERS
        with LocalWorkers(target, run.config.workers, store, method, logs) as workers:
            failed = _supervise(workers, monitor, signals, show, restart)
    monitor.poll()
    board.close()
    result = monitor.result(failed)
    result.interrupted |= signals.count > 0
    return result


def _supervise(workers: LocalWorkers, monitor: RunMonitor, signals: StopSignals, show: Show, restart: bool) -> str:
    """Monitor, restart and stop the workers until all have ended; return why the run failed, if it did."""
    handled: set[int] = set()
    restarts = [0] * workers.workers
    while True:
        codes = workers.exit_codes()
        events = monitor.poll()
        for rank in sorted(codes.keys() - handled):
            handled.add(rank)
            status = monitor.status[rank]
            if status.state == DONE:
                continue
            why = status.error if status.state == FAILED else describe_exit(codes[rank])
            if signals.count:
                monitor.gone[rank] = why
            elif not monitor.started:
                return f"worker {rank} ended before the training began: {why}"
            else:
                events.append(monitor.mark_gone(rank, why))
                # A worker whose input is bad would only fail again.
                if restart and codes[rank] != BAD_INPUT and restarts[rank] < MAX_RESTARTS:
                    restarts[rank] += 1
                    workers.start(rank)
                    monitor.mark_restarted(rank)
                    handled.remove(rank)
                    events.append(f"worker {rank} started again")
        show(monitor.view(), events)
        if len(handled) == workers.workers:
            done = any(status.state == DONE for status in monitor.status)
            return "" if done or signals.count else f"no worker is left: {next(iter(monitor.gone.values()))}"
        if signals.count:
            workers.request_stop()
            if signals.count > 1 or workers.stop_timed_out or not monitor.started:
                workers.kill()
        time.sleep(POLL_S)


def train_as_worker(
    job_spec: JobSpec, run: Run, rank_info: RankInfo, show: Show, on_point: OnPoint, history: Sequence[Point] = ()
) -> TrainingResult | None:
    """Run the job as one of the workers that a launcher started; rank 0 monitors all of them and has the result."""
    rank_info = replace(rank_info, prefix=f"{rank_info.prefix}{run.config.method}/")
    if rank_info.rank != 0:
        run_worker(job_spec, rank_info)
        return None
    board = StatusBoard(rank_info.connect_store())
    monitor = _MonitorThread(RunMonitor(run, board, job_spec, on_point, history), show)
    try:
        run_worker(job_spec, rank_info)
    finally:
        result = monitor.finish()
    return result


class _MonitorThread:
    """Monitors all workers from rank 0, while that trains."""

    def __init__(self, monitor: RunMonitor, show: Show) -> None:
        self.monitor, self.show = monitor, show
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer-monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._finished.wait(POLL_S):
            self._poll()

    def _poll(self) -> None:
        events = self.monitor.poll()
        for rank, silent_s in enumerate(self.monitor.silent_s):
            if silent_s > LAST_STATUS_S and self.monitor.started and self._missing(rank):
                events.append(self.monitor.mark_gone(rank, f"silent for {silent_s:.0f} s"))
        self.show(self.monitor.view(), events)

    def _missing(self, rank: int) -> bool:
        return rank not in self.monitor.gone and self.monitor.status[rank].state not in (DONE, FAILED)

    def finish(self) -> TrainingResult:
        """Wait for the last status of every worker and return the result."""
        until = time.monotonic() + LAST_STATUS_S
        everybody = range(self.monitor.run.config.workers)
        while time.monotonic() < until and any(self._missing(rank) for rank in everybody):
            time.sleep(0.02)
        self._finished.set()
        self._thread.join()
        self._poll()
        for rank in everybody:
            if self._missing(rank):
                self.monitor.mark_gone(rank, "no last status")
        self.monitor.board.close()
        return self.monitor.result("")
