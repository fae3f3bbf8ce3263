"""A run, from its job_spec to its result: with workers of our own on this machine, or as one of many under torchrun."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gossamer.config import Run
from gossamer.process.store.rank_info import RankInfo
from gossamer.report.view import View
from gossamer.results import Point
from gossamer.train.entrypoint import run_worker
from gossamer.train.job_spec import JobSpec
from gossamer.train.launcher import LocalStore, StopSignals, Workers, why_ended
from gossamer.train.monitor import LOOK_S, Keep, RunMonitor
from gossamer.train.result import TrainingResult
from gossamer.train.status import DONE, FAILED, StatusBoard

BAD_INPUT = 2
"""The exit code of a worker that cannot do what it is asked."""

RESTARTS = 3
"""How often one worker is started again before it is given up."""

LAST_REPORTS_S = 30.0
"""How long rank 0 waits for the others' last reports, which come right after the last average."""

Show = Callable[[View, list[str]], None]
"""Called with how far the run is, and what happened since the last time."""


def launch(
    job_spec: JobSpec,
    run: Run,
    meeting: LocalStore,
    stops: StopSignals,
    show: Show,
    keep: Keep,
    restart: bool,
    history: Sequence[Point] = (),
) -> TrainingResult:
    """Run it with workers started here."""
    status_board = meeting.status_board(run.config.method)
    watch = RunMonitor(run, status_board, job_spec, keep, history)
    with Workers(job_spec, run.config.workers, meeting.port) as workers:
        failed = _attend(workers, watch, stops, show, restart)
    watch.look()
    status_board.close()
    result = watch.result(failed)
    result.interrupted |= stops.count > 0
    return result


def _attend(workers: Workers, watch: RunMonitor, stops: StopSignals, show: Show, restart: bool) -> str:
    """Stay with the workers until they have ended; returns why they have come to nothing, if so."""
    known: set[int] = set()
    restarts = [0] * workers.count
    while True:
        ended = workers.ended()
        events = watch.look()
        for rank in sorted(ended.keys() - known):
            known.add(rank)
            if watch.reports[rank].state == DONE:
                continue
            why = why_ended(ended[rank], watch.status_board, rank)
            if stops.count:
                watch.gone[rank] = why
            elif not watch.started:
                return f"worker {rank} ended before the training began: {why}"
            else:
                events.append(watch.lose(rank, why))
                # One that was told that it cannot take part would only be told so again.
                if restart and ended[rank] != BAD_INPUT and restarts[rank] < RESTARTS:
                    restarts[rank] += 1
                    workers.start(rank)
                    watch.regain(rank)
                    known.remove(rank)
                    events.append(f"worker {rank} started again")
        show(watch.view(), events)
        if len(known) == workers.count:
            done = any(report.state == DONE for report in watch.reports)
            return "" if done or stops.count else f"no worker is left: {next(iter(watch.gone.values()))}"
        if stops.count:
            workers.ask_to_stop()
            if stops.count > 1 or workers.too_slow_to_stop or not watch.started:
                workers.kill()
        time.sleep(LOOK_S)


def take_part(
    job_spec: JobSpec, run: Run, rank_info: RankInfo, show: Show, keep: Keep, history: Sequence[Point] = ()
) -> TrainingResult | None:
    """Run it as the worker at ``place``; rank 0 watches all of them and has the result."""
    rank_info = replace(rank_info, prefix=f"{rank_info.prefix}{run.config.method}/")
    if rank_info.rank != 0:
        run_worker(job_spec, rank_info)
        return None
    watcher = _Watcher(rank_info, run, job_spec, show, keep, history)
    try:
        run_worker(job_spec, rank_info)
    finally:
        result = watcher.end()
    return result


class _Watcher:
    """Watches all workers beside one's own training."""

    def __init__(
        self, rank_info: RankInfo, run: Run, job_spec: JobSpec, show: Show, keep: Keep, history: Sequence[Point]
    ) -> None:
        self.status_board = StatusBoard(rank_info.connect_store())
        self.watch, self.show = RunMonitor(run, self.status_board, job_spec, keep, history), show
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._attend, name="gossamer-watch", daemon=True)
        self._thread.start()

    def _attend(self) -> None:
        while not self._over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        events = self.watch.look()
        for rank, silent_s in enumerate(self.watch.silent_s):
            if silent_s > LAST_REPORTS_S and self.watch.started and self._missing(rank):
                events.append(self.watch.lose(rank, f"silent for {silent_s:.0f} s"))
        self.show(self.watch.view(), events)

    def _missing(self, rank: int) -> bool:
        return rank not in self.watch.gone and self.watch.reports[rank].state not in (DONE, FAILED)

    def end(self) -> TrainingResult:
        """Wait for everybody's last report."""
        until = time.monotonic() + LAST_REPORTS_S
        everybody = range(self.watch.run.config.workers)
        while time.monotonic() < until and any(self._missing(rank) for rank in everybody):
            time.sleep(0.02)
        self._over.set()
        self._thread.join()
        self._look()
        for rank in everybody:
            if self._missing(rank):
                self.watch.lose(rank, "no last report")
        self.status_board.close()
        return self.watch.result("")
