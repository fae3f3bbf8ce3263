"""Runs of the method under test with real processes, and their twins in the virtual cluster."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.testing.subject import Subject
from gossamer.testing.violations import Broken
from gossamer.testing.worlds.real_worker import Job, main
from gossamer.testing.worlds.virtual_runs import INSTANT, make_cluster, models, watch_steps
from gossamer.train.launcher import FORK_SERVER, LocalStore, LocalWorkers, describe_exit

START_TIMEOUT_S = 120.0
"""How long processes may take to start: the first ones load torch."""

JOB_TIMEOUT_S = 120.0
"""How long a job may take from then on, on a busy machine."""

POLL_S = 0.02

Results = list[dict[str, Any]]
"""What each worker reports at its end, by rank."""

_names = itertools.count()


def warm_up() -> None:
    """Start the fork server, so that it loads torch while this process goes on."""
    FORK_SERVER.set_forkserver_preload(["gossamer.testing.worlds.real_worker", "torch._dynamo"])
    forkserver.ensure_running()


@dataclass(frozen=True)
class Twin:
    """The same run in the virtual cluster."""

    trajectory: dict[tuple[int, int], Tensor]
    """The parameters of each worker after each of its steps, by rank and step."""
    bytes_sent: list[int]
    model: Tensor
    half: int
    """A step after which something is in flight, if there is one, and the middle of the run otherwise."""


@dataclass(frozen=True)
class RealTraining:
    """A run with real processes."""

    job: Job
    results: Results
    twin: Twin | None
    """Its twin; None if the order of events decides what happens."""


def train(subject: Subject, workers: int, reach: int) -> RealTraining:
    """Train with real processes. ``reach``: steps in which workers communicate twice."""
    graph, workers = subject.first_fit(("ring", workers), ("ring", 4), ("ring", 2))
    method = subject.build(graph, workers)
    steps = max(12, 3 * reach // 2)
    twin = None
    if method.lockstep and method.background is None:
        twin = simulate_twin(subject, graph, workers, steps)
    job = Job(
        script="train",
        subject=subject.reference(),
        graph=graph,
        workers=workers,
        steps=steps if twin else 0,
        half=twin.half if twin else 8,
    )
    return RealTraining(job, run_job(job), twin)


def simulate_twin(subject: Subject, graph: str, workers: int, steps: int) -> Twin:
    trajectory: dict[tuple[int, int], Tensor] = {}
    busy: set[int] = set()

    def seen(worker: Any) -> None:
        trajectory[worker.rank, worker.step] = worker.x + 0.0
        if worker.tickets:
            busy.add(worker.step + 1)

    method = watch_steps(subject.build(graph, workers, Job.seed), seen)
    cluster = make_cluster(subject, graph, workers, method=method, seed=Job.seed, **INSTANT)
    cluster.run_until(float(steps))
    cluster.finish()
    middle = [step for step in busy if steps // 4 <= step <= 3 * steps // 4]
    return Twin(
        trajectory,
        [worker.bytes_sent for worker in cluster.workers],
        models(cluster).mean(0),
        max(middle, default=steps // 2),
    )


def run_rejoin(job: Job) -> Results:
    """Run the job in which a worker is killed and started again."""
    return run_job(job, restart=job.workers - 1)


def run_job(job: Job, restart: int | None = None) -> Results:
    """Run a job and return what its workers report. Worker ``restart`` is started again when it has been killed."""
    store, name = LocalStore(), f"check-{next(_names)}"
    until, started = time.monotonic() + START_TIMEOUT_S, False
    with (
        tempfile.TemporaryDirectory(prefix="gossamer-testing-") as logs,
        LocalWorkers(
            partial(main, job.to_json()), store.rank_infos(job.workers, name), Path(logs) / "logs"
        ) as processes,
    ):
        board = store.connect(name)
        try:
            while True:
                results = [board.get(f"result/{rank}") for rank in range(job.workers)]
                if all(results):
                    return [json.loads(result) for result in results if result is not None]
                codes = processes.exit_codes()
                if restart in codes and board.get("killed") and not board.get("restarted"):
                    board.set("restarted", "1")
                    assert restart is not None
                    processes.start(restart)
                    codes.pop(restart)
                for rank in range(job.workers):
                    failed = board.get(f"failed/{rank}")
                    if failed is not None:
                        raise Broken("processes", f"worker {rank} failed: {failed.decode()}")
                    if rank in codes and results[rank] is None and board.get(f"result/{rank}") is None:
                        raise Broken("processes", _describe_end(rank, codes[rank], processes.log(rank)))
                if not started and all(board.get(f"started/{rank}") for rank in range(job.workers)):
                    until, started = time.monotonic() + JOB_TIMEOUT_S, True
                if time.monotonic() > until:
                    raise Broken("processes", _describe_hang(job, results, started))
                time.sleep(POLL_S)
        finally:
            board.close()


def _describe_end(rank: int, code: int, log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    said = f": {lines[-1]}" if lines else ""
    return (
        f"worker {rank} {describe_exit(code)} before it began{said}. If check_method is called at the top level of a "
        'script, put the call below `if __name__ == "__main__":`'
    )


def _describe_hang(job: Job, results: list[bytes | None], started: bool) -> str:
    if not started:
        return f"{job.workers} processes could not be started in {START_TIMEOUT_S:g} s: is the machine too busy?"
    missing = ", ".join(str(rank) for rank, result in enumerate(results) if result is None)
    return f"worker {missing} did not come to its end in {JOB_TIMEOUT_S:g} s ({job.graph} of {job.workers} processes)"


def largest_difference(one: Any, other: Any) -> float:
    return float((torch.as_tensor(one, dtype=torch.float64) - torch.as_tensor(other, dtype=torch.float64)).abs().max())
