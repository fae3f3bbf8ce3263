"""Workers that are stopped, slow, out of data early, or interrupted with Ctrl-C.

A part of the fault suite (``repeat_faults``).
"""

from __future__ import annotations

import signal
import time

import pytest
from fault_checks import EVERY, NOT_WAITING, WAITING, good, newest_steps
from real_workers import RealWorkers


@pytest.mark.parametrize(
    ("method", "victim"),
    # Rank 0 hosts the store.
    [(method, at % 3) for at, method in enumerate(EVERY)],
)
def test_stopped_for_ten_seconds(method: str, victim: int) -> None:
    others = [rank for rank in range(4) if rank != victim]
    steps = [160 if rank == victim else 300 for rank in range(4)]
    with RealWorkers(4, method=method, steps=steps, compute_s=0.05) as workers:
        for worker in workers:
            worker.step(20)
        workers[victim].signal(signal.SIGSTOP)
        before = newest_steps(workers, others)
        time.sleep(10)
        # Nobody waits for it to wake up.
        for rank, step in zip(others, before, strict=True):
            workers[rank].step(step + 20)
        workers[victim].signal(signal.SIGCONT)
        ends = workers.finished()
        trained = [worker.reports[-2] for worker in workers]
    if method in NOT_WAITING:
        assert [report["steps"] for report in trained] == steps
    # The deadline of a collective is a minute or more.
    assert max(trained[rank]["longest"] for rank in others) < 30
    good(ends)


@pytest.mark.parametrize("method", NOT_WAITING)
def test_a_slow_worker_and_one_that_leaves_early_hold_up_nobody(method: str) -> None:
    steps = [200, 40, 100, 200]
    with RealWorkers(4, method=method, steps=steps, compute_s=[0.02, 0.1, 0.02, 0.02]) as workers:
        ends = workers.finished()
        trained = [worker.reports[-2] for worker in workers]
    assert [report["steps"] for report in trained] == steps
    assert max(trained[rank]["longest"] for rank in (0, 2, 3)) < 1.0
    good(ends)


@pytest.mark.parametrize("method", WAITING)
def test_a_worker_leaves_after_half_its_batches(method: str) -> None:
    with RealWorkers(4, method=method, steps=[120, 120, 60, 120]) as workers:
        good(workers.finished())


@pytest.mark.parametrize("method", EVERY)
def test_ctrl_c(method: str) -> None:
    with RealWorkers(4, method=method, steps=10_000) as workers:
        for worker in workers:
            worker.step(20)
        for worker in workers:
            worker.signal(signal.SIGINT)
        for worker in workers:
            worker.process.join(60)
        codes = [worker.process.exitcode for worker in workers]
    assert codes == [1, 1, 1, 1]


@pytest.mark.parametrize("method", ["gossip", "overlap"])
def test_ctrl_c_for_one_of_them(method: str) -> None:
    with RealWorkers(4, method=method, steps=120) as workers:
        for worker in workers:
            worker.step(20)
        workers[2].signal(signal.SIGINT)
        workers[2].process.join(60)
        assert workers[2].process.exitcode == 1
        good(workers.finished([0, 1, 3]))
