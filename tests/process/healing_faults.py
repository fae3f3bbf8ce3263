"""What is left of a partition when it is over: nothing of what either side did is lost, and both sides say so.

A part of the fault suite (``repeat_faults``).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_checks import WAITING
from partition_faults import LIMIT_S, finished, hosts, steps_more, workers_on  # noqa: F401
from real_workers import Late, RealWorker, RealWorkers, Report
from training_script import TOLD_WEIGHTS

from gossamer.process.store.rank_info import free_port
from hosts import Hosts

HOLD = 400
SETTINGS = {"localsgd": {"period": 4}, "diloco": {"period": 4}}


def merged(report: Report) -> list[str]:
    return [event for event in report.get("events", ()) if "trained separately" in event]


def all_merged(workers: RealWorkers) -> None:
    for worker in workers:
        worker.until(lambda report: bool(merged(report)), LIMIT_S)


# Before finish


def told_weights(worker: RealWorker) -> list[list[float]]:
    """The weights after each of the steps from the end of the partition on."""
    told = [worker.until(lambda report: report["at"] == "weights" and report["step"] > HOLD, LIMIT_S)]
    told += [worker.at("weights", LIMIT_S) for _ in range(TOLD_WEIGHTS - 1)]
    # Soon after the network was whole.
    assert told[0]["step"] < HOLD + 60
    return [report["weights"] for report in told]


def first_held(side: list[RealWorker]) -> RealWorker:
    """The first of them that is at the hold. If it was a step behind when the network was cut, others wait for it."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        for worker in side:
            while worker.waiting():
                if worker.next()["at"] == "weights":
                    return worker
        time.sleep(0.05)
    raise Late(f"none of workers {[worker.rank for worker in side]} is at step {HOLD}")


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("method", ["allreduce", "overlap"])
def test_sides_with_equal_steps_have_equal_weights_again_before_the_end(
    hosts: Hosts,  # noqa: F811
    tmp_path: Path,
    method: str,
) -> None:
    order = {"hold": (HOLD, tmp_path / "go on"), "width": 4}
    with workers_on(hosts, tmp_path, method, **order) as workers:
        for worker in workers:
            worker.at("joined", LIMIT_S)
            worker.step(20)
        hosts.isolate(2)
        # Each side trains alone up to the same step, and waits there.
        held = [first_held([workers[0], workers[1]]), first_held([workers[2]])]
        before = [worker.reports[-1] for worker in held]
        hosts.reconnect(2)
        for worker, other in zip(held, (2, 0), strict=True):
            worker.until(lambda report: f"worker {other} is back" in report.get("events", ()), LIMIT_S)  # noqa: B023
        (tmp_path / "go on").touch()
        told = [told_weights(worker) for worker in workers]
        (tmp_path / "enough").touch()
        ends = finished(workers)
    assert [report["step"] for report in before] == [HOLD] * 2
    apart = distance(before[0]["weights"], before[1]["weights"])
    assert apart > 1e-3
    # A worker may be a step behind another one.
    middle = TOLD_WEIGHTS // 2
    nearest = [min(distance(told[2][middle], weights) for weights in told[rank]) for rank in (0, 1)]
    print(f"{method}: sides {apart:.4f} apart, then {nearest}")
    # With overlap the workers' weights differ by their last updates.
    assert max(nearest) < (apart / 10 if method == "overlap" else 1e-6)
    assert all(len(merged(end)) == 1 for end in ends)


# One side does more


@pytest.mark.parametrize("method", WAITING)
def test_a_side_with_more_steps_counts_more_and_nothing_is_discarded(
    hosts: Hosts,  # noqa: F811
    tmp_path: Path,
    method: str,
) -> None:
    order = {"settings": SETTINGS.get(method, {}), "compute_s": [0.01, 0.01, 0.04]}
    with workers_on(hosts, tmp_path, method, **order) as workers:
        for worker in workers:
            worker.at("joined", LIMIT_S)
            worker.step(20)
        hosts.isolate(2)
        steps_more(workers, (0, 1), 40)
        steps_more(workers, (2,), 40)
        cut = [worker.reports[-1]["step"] for worker in workers]
        steps_more(workers, (0, 1, 2), 100)
        hosts.reconnect(2)
        all_merged(workers)
        after = [next(report["step"] for report in worker.reports if merged(report)) for worker in workers]
        steps_more(workers, (0, 1, 2), 20)
        (tmp_path / "enough").touch()
        ends = finished(workers)
    print(f"{method}: steps {cut} and {after}, {[merged(end) for end in ends]}")
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert all(end["missing"] == [] and end["accuracy"] > 0.95 for end in ends)
    shares: dict[str, int] = {}
    for end in ends:
        (text,) = merged(end)
        assert text == merged(ends[0])[0]
        shares = {
            ranks: int(percent) for percent, ranks in re.findall(r"(\d+)% of workers? ([\d, ]*\d)(?![\d%])", text)
        }
    # By what each side has done alone, times its workers: the others were four times as fast, and two of them.
    assert abs(sum(shares.values()) - 100) <= 1
    # One of two may have been a step behind the other.
    assert len(shares) == 2
    assert shares.keys() - {"2"} <= {"0, 1", "0", "1"}
    assert 0 < shares["2"] < 35
    if method in ("allreduce", "overlap"):
        assert [end["dropped"] for end in ends] == [0, 0, 0]


# The end of the command


def newest(path: Path) -> Report:
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return json.loads(lines[-1]) if lines else {"steps": 0, "state": ""}


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("method", ["allreduce", "a2cid2"])
def test_the_command_fails_if_it_ends_in_a_partition_unless_that_is_allowed(
    hosts: Hosts,  # noqa: F811
    tmp_path: Path,
    method: str,
    allowed: bool,
) -> None:
    """Each worker is a command of its own, as under SLURM."""
    environment = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = tmp_path / "run"
    command = [sys.executable, "-m", "gossamer", "train", "--task", "quadratic", "--method", method]
    command += ["--steps", "600", "--compute", "10ms", "--out", str(run), *(["--allow-missing"] if allowed else [])]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                started.append(hosts.start(rank, command, {**environment, "RANK": str(rank)}, file.fileno()))
        until = time.monotonic() + LIMIT_S
        while min(newest(run / "workers" / f"{rank}.jsonl")["steps"] for rank in range(2)) < 20:
            assert time.monotonic() < until, [log.read_text() for log in logs]
            time.sleep(0.05)
        hosts.isolate(1)
        codes = [process.wait(LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = [log.read_text() for log in logs]
    assert codes == [0 if allowed else 1] * 2, said
    hint = "" if allowed else "; --allow-missing accepts that"
    assert f"gossamer: {method}: the final model is without rank 1{hint}" in said[0].splitlines()[-1]
    assert "Traceback" not in "".join(said)
