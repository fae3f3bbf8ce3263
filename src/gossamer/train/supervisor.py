"""Runs a job to its result: with workers started on this machine, or as one of the workers that a launcher started."""

from __future__ import annotations

import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gossamer.config import Run
from gossamer.process.store.rank_info import RankInfo
from gossamer.report.view import View
from gossamer.results import Point
from gossamer.runs.monitor import POLL_S, SILENT_S, OnPoint, RunFacts, RunMonitor, TrainingResult
from gossamer.runs.monitor_thread import MonitorThread
from gossamer.runs.run_folder import WORKERS
from gossamer.runs.status import DONE, FAILED, LEFT, StatusBoard, WorkerStatus
from gossamer.train.checkpoint_requests import CheckpointRequests
from gossamer.train.entrypoint import LEAVE_ON_NOTHING, run_worker, worker_main
from gossamer.train.job_spec import JobSpec
from gossamer.train.launcher import BAD_INPUT, LocalStore, LocalWorkers, StopSignals, describe_exit
from gossamer.train.replica.place import shard_prefix
from gossamer.train.replica.status import ReplicaBoard

MAX_RESTARTS = 3
"""How often one worker is started again."""

LAST_STATUS_S = 30.0
"""How long rank 0 waits for the others' last status, which comes right after the final average."""


class Failure(NamedTuple):
    """Why a run has no outcome."""

    why: str = ""
    """Empty: it has one."""
    bad_input: bool = False
    """Whether something that the user gave cannot be used, as only a worker could see."""


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
    c = run.config
    if c.replica_size == 1:
        board = StatusBoard(store.connect(method))
    else:
        shards = [StatusBoard(store.connect(shard_prefix(method, shard))) for shard in range(c.replica_size)]
        board = ReplicaBoard(shards)
    monitor = RunMonitor(run_facts(run), board, on_point, history, also_poll=CheckpointRequests(run, job_spec).poll)
    target = partial(worker_main, job_spec.to_json())
    scratch = tempfile.TemporaryDirectory(prefix="gossamer-") if job_spec.path is None else nullcontext("")
    with scratch as folder:
        logs = job_spec.path / WORKERS if job_spec.path is not None else Path(folder) / WORKERS
        with LocalWorkers(target, store.rank_infos(c.workers, method), logs, c.replica_size) as workers:
            failure = supervise(workers, monitor, signals, show, restart)
    await_newcomers(monitor, workers.ranks)
    board.close()
    result = monitor.result(*failure)
    result.interrupted |= signals.count > 0
    return result


def await_newcomers(monitor: RunMonitor, own: Collection[int]) -> None:
    """Read the last status of workers that came later, with another command: they end at the same time."""
    until = time.monotonic() + LAST_STATUS_S
    while True:
        monitor.poll()
        others = [monitor.status[rank] for rank in monitor.roster.ranks if rank not in own]
        ended = (DONE, LEFT, FAILED)
        if all(status.state in ended or monitor.silent_s[status.rank] > SILENT_S for status in others):
            return
        if time.monotonic() > until:
            return
        time.sleep(POLL_S)


def supervise(workers: LocalWorkers, monitor: RunMonitor, signals: StopSignals, show: Show, restart: bool) -> Failure:
    """Monitor, restart and stop the workers until all have ended; return why the run failed, if it did."""
    handled: set[int] = set()
    restarts: Counter[int] = Counter()
    while True:
        codes = workers.exit_codes()
        events = monitor.poll()
        for rank in sorted(codes.keys() - handled):
            handled.add(rank)
            status = monitor.status[rank]
            if status.state in (DONE, LEFT):
                continue
            # A rank that was killed is why others of its replica failed.
            why = status.error if status.state == FAILED and codes[rank] > 0 else describe_exit(codes[rank])
            if signals.count:
                monitor.gone[rank] = why
            elif not monitor.started:
                return Failure(f"worker {rank} ended before the training began: {why}", codes[rank] == BAD_INPUT)
            else:
                events.append(monitor.mark_gone(rank, why))
                # A worker whose input is bad would only fail again.
                if restart and codes[rank] != BAD_INPUT and restarts[rank] < MAX_RESTARTS:
                    restarts[rank] += 1
                    workers.start(rank)
                    handled.remove(rank)
                    events.append(monitor.mark_restarted(rank))
        show(monitor.view(), events)
        if len(handled) == len(workers.ranks):
            done = any(monitor.status[rank].state in (DONE, LEFT) for rank in workers.ranks)
            if done or signals.count:
                return Failure()
            first, why = next(iter(monitor.gone.items()))
            return Failure(f"no worker is left: {why}", codes.get(first) == BAD_INPUT)
        if signals.count:
            # Upon SIGTERM one of them would leave, and the others go on.
            workers.request_stop(signal.SIGINT)
            if signals.count > 1 or workers.stop_timed_out() or not monitor.started:
                workers.kill()
        time.sleep(POLL_S)


def _own_prefix(rank_info: RankInfo, run: Run) -> RankInfo:
    """Each of several runs of a job has keys of its own in the store."""
    return replace(rank_info, prefix=f"{rank_info.prefix}{run.config.method}/")


def run_launched(
    job_spec: JobSpec, run: Run, rank_info: RankInfo, leave_on: frozenset[int] = LEAVE_ON_NOTHING
) -> WorkerStatus:
    """Train as one of the workers that a launcher started; return its last status."""
    return run_worker(job_spec, _own_prefix(rank_info, run), leave_on=leave_on)


def train_as_worker(
    job_spec: JobSpec, run: Run, rank_info: RankInfo, show: Show, on_point: OnPoint, history: Sequence[Point] = ()
) -> TrainingResult | None:
    """Run the job as one of the workers that a launcher started; rank 0 monitors all of them and has the result."""
    if rank_info.rank != 0:
        run_launched(job_spec, run, rank_info)
        return None
    board = StatusBoard(_own_prefix(rank_info, run).connect_store())
    checkpoints = CheckpointRequests(run, job_spec)
    monitor = RunMonitor(run_facts(run), board, on_point, history, also_poll=checkpoints.poll)

    def why_gone(rank: int) -> str:
        silent_s = monitor.silent_s[rank]
        return f"silent for {silent_s:.0f} s" if silent_s > LAST_STATUS_S and monitor.started else ""

    thread = MonitorThread(monitor, why_gone, lambda events: show(monitor.view(), events))
    try:
        run_launched(job_spec, run, rank_info)
    finally:
        thread.finish(LAST_STATUS_S)
        board.close()
    return monitor.result("")


def run_facts(run: Run) -> RunFacts:
    c = run.config
    batch = c.worker_batch if run.task.gradients else 0
    return RunFacts(c.method, run.topology.name, c.workers, c.seed, run.method().pairwise, c.steps, batch)
