"""The entry point of a worker's process: trains, stops when asked to, publishes why it failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gossamer.errors import one_line
from gossamer.process.store.rank_info import RankInfo
from gossamer.runs.status import FAILED, StatusBoard, WorkerStatus
from gossamer.train.job_spec import JobSpec
from gossamer.train.launcher import STOP_SIGNALS, handling_stop_signals, orphaned
from gossamer.train.stop_coordinator import StopCoordinator
from gossamer.train.training import Training
from gossamer.train.worker_task import own_device

if TYPE_CHECKING:
    from gossamer.train.replica.place import ReplicaPlace

FAILURE_TIMEOUT_S = 10.0
"""How long a worker that fails tries to publish why."""


LEAVE_ON_NOTHING: frozenset[int] = frozenset()
LEAVE_ON_TERM = frozenset({signal.SIGTERM})
LEAVE_ON_ANY = frozenset(STOP_SIGNALS)
"""Upon which signals a worker leaves for good. Upon the others the whole run stops."""


def worker_main(job: str, rank_info: RankInfo, place: ReplicaPlace | None = None) -> int:
    """Train as a process that ``LocalWorkers`` started; ``job``: a job spec as JSON. Returns the exit code."""
    came = rank_info.rank in rank_info.came
    # The command that has started the run stops it by SIGINT, as a terminal does. One that came later cannot stop it.
    # A rank of a replica cannot leave without the others.
    leave_on = LEAVE_ON_ANY if came else LEAVE_ON_NOTHING if place is not None else LEAVE_ON_TERM
    status = run_worker(JobSpec.from_json(job), rank_info, orphaned, leave_on, place)
    return 130 if status.interrupted else 0


def run_worker(
    job_spec: JobSpec,
    rank_info: RankInfo,
    should_stop: Callable[[], bool] = lambda: False,
    leave_on: frozenset[int] = LEAVE_ON_NOTHING,
    place: ReplicaPlace | None = None,
) -> WorkerStatus:
    """Train as one worker until the end of the run, or until ``should_stop()``; return the last status.

    ``leave_on``: the signals upon which this worker leaves for good, instead of stopping the run. ``place``: which rank
    of its worker this process is, if the worker is a replica that this command started.
    """
    replica = None
    if place is not None:
        # It loads much of torch.distributed.
        from gossamer.train.replica.rank import ReplicaRank

        replica = ReplicaRank(place, rank_info, own_device(str(job_spec.values["device"])))
    board = StatusBoard(rank_info.connect_store())
    status = WorkerStatus(rank_info.rank)
    try:
        run = job_spec.run()
        coordinator = StopCoordinator(rank_info.rank, rank_info.roster.ranks, lockstep=run.method().lockstep)

        def on_signal(number: int) -> None:
            if number not in leave_on:
                coordinator.stop_requested.set()
            elif coordinator.leave_requested_at is None:
                coordinator.leave_requested_at = time.monotonic()

        # However often signals come: the launcher kills workers that are too slow.
        with handling_stop_signals(on_signal):
            training = Training(job_spec, run, rank_info, board, coordinator, should_stop, replica)
            status = training.status
            return training.run_all()
    except Exception as error:
        status.state, status.error = FAILED, one_line(error)
        board.put(status, FAILURE_TIMEOUT_S)
        raise
    finally:
        board.close()
        if replica is not None:
            replica.close()
