"""A worker's process: its part in a run, what it does when it is asked to stop, and what it says when it fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gossamer.errors import InputError
from gossamer.process.store.rank_info import RankInfo
from gossamer.train.job_spec import JobSpec
from gossamer.train.status import FAILED, StatusBoard, WorkerStatus
from gossamer.train.stop_coordinator import StopCoordinator
from gossamer.train.training import Training

STOPS = (signal.SIGINT, signal.SIGTERM)

LAST_WORDS_S = 10.0
"""How long a worker that fails tries to say why."""


def run_worker(job_spec: JobSpec, rank_info: RankInfo, orphaned: Callable[[], bool] = lambda: False) -> WorkerStatus:
    """Take part in a run as the worker at ``place``, until its end or until ``orphaned``; returns the last report."""
    status_board = StatusBoard(rank_info.connect_store())
    report = WorkerStatus(rank_info.rank)
    try:
        run = job_spec.run()
        stop_coordinator = StopCoordinator(rank_info.rank, rank_info.workers, together=run.method().lockstep)
        with _heeding_stops(stop_coordinator):
            training = Training(job_spec, run, rank_info, status_board, stop_coordinator, orphaned)
            report = training.report
            return training.whole()
    except Exception as error:
        report.state, report.error = FAILED, one_line(error)
        status_board.put(report, LAST_WORDS_S)
        raise
    finally:
        status_board.close()


@contextmanager
def _heeding_stops(stop_coordinator: StopCoordinator) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask to stop, however often they come: whoever is in a hurry kills."""
    before = {number: signal.signal(number, lambda *_: stop_coordinator.asked.set()) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def one_line(error: Exception) -> str:
    """What went wrong and where, in one line."""
    said = " ".join(str(error).split())
    if isinstance(error, InputError):
        return said
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {said}{where}"


def work(order_text: str, rank_info: RankInfo, environment: dict[str, str], log: str) -> None:
    """What a process does that was forked to be a worker: all that it prints goes to its log."""
    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(file.fileno(), descriptor)
    if rank_info.workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    job_spec = JobSpec.of_text(order_text)
    try:
        report = run_worker(job_spec, rank_info, _orphaned)
    except InputError as error:
        print(f"gossamer: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(130 if report.interrupted else 0)


def _orphaned() -> bool:
    """Whether the process that had us forked is there no more."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()
