"""Ranks of replicas that are killed while the others exchange: a part of the fault suite (``repeat_faults``)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import replica_script
from fault_checks import measured, newest_steps
from real_workers import RealWorkers, Report

from gossamer.process.store.rank_info import free_port

REPLICAS, SHARDS = 3, 2
METHODS: dict[str, dict[str, Any]] = {
    "gossip": {"rate": 0.5},
    "a2cid2": {"rate": 0.5},
    "lasgd": {},
    "noloco": {"period": 4},
    "allreduce": {},
    "diloco": {"period": 4, "delay": 2},
}
STALL_S, RETURN_S = 1.0, 10.0
"""By how much the longest step of the others may grow; how long a replica may take to exchange again."""
WARM_UP = 20
"""Steps before which nothing is measured: the first ones connect, and allocate."""


def longest_step(reports: list[Report]) -> float:
    """Return the longest time between the ends of two steps, the first of them after the warm-up."""
    ends = [report["now"] for report in reports if report["at"] == "step" and report["step"] >= WARM_UP]
    return max(after - before for before, after in pairwise(ends))


@pytest.mark.parametrize(
    ("method", "hangs"), [*((method, False) for method in METHODS), ("allreduce", True), ("diloco", True)]
)
def test_a_replica_that_lost_a_rank_delays_nobody_and_exchanges_again(
    method: str, hangs: bool, run: int, tmp_path: Path
) -> None:
    """``hangs``: the rank that is left hangs in a collective of the replica, as with NCCL."""
    # The first rank of the replica for half of the methods, its second one for the others; then the other way.
    killed = 2 + (list(METHODS).index(method) + run) % 2
    jobs = {"jobs": True, "ports": [free_port() for _ in range(2 * REPLICAS)], "address": f"127.0.0.1:{free_port()}"}
    order = {"kind": "fsdp", "method": method, "settings": METHODS[method], "constant": True, "compute_s": 0.05}
    order["hangs_s"] = 60.0 if hangs else 0.0
    shape, survivors = (REPLICAS, SHARDS), [0, 1, 4, 5]
    with RealWorkers(
        math.prod(shape), script=replica_script.run, shape=shape, last=tmp_path / "last", **jobs, **order
    ) as ranks:
        for rank in ranks:
            rank.exchanged(more_than=3)
        for rank in ranks:
            rank.step(2 * WARM_UP)
        usual = {rank: longest_step(ranks[rank].reports) for rank in survivors}
        ranks.kill(killed)
        other = ranks[5 - killed]
        other.process.join(30)
        assert other.process.exitcode not in (0, None)
        for rank, step in zip(survivors, newest_steps(ranks, survivors), strict=True):
            before = ranks[rank].reports[-1]
            after = ranks[rank].step(step + 20)
            assert after["exchanges"] > before["exchanges"]
        began = time.monotonic()
        for rank in [ranks.restart(rank) for rank in (2, 3)]:
            rank.exchanged()
        returned_s = time.monotonic() - began
        # Whoever gives its state to the replica that is back must not stall either.
        for rank, step in zip(survivors, newest_steps(ranks, survivors), strict=True):
            ranks[rank].step(step + 20)
        (tmp_path / "last").touch()
        ends = ranks.finished()
        grown_s = max(longest_step(ranks[rank].reports) - usual[rank] for rank in survivors)
    case = f"{method}, rank {killed}{', the other one hangs' if hangs else ''}"
    measured(f"lost_a_rank {case}: longest step grew by {grown_s:.2f} s; back after {returned_s:.1f} s")
    for end in ends:
        assert end["torn"] == []
        assert end["weights"] == ends[0]["weights"]
    assert grown_s < STALL_S
    assert returned_s < RETURN_S


PAGE = Path(__file__).parents[2] / "docs" / "several-machines.md"
SCRIPT = Path(__file__).with_name("torchrun_script.py")
SCONTROL = """#!/bin/bash
echo 127.0.0.1
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" > "task-$task.log" 2>&1 &
done
wait
"""
"""What srun does with the script of the docs: a task for each node, which is told which one it is; all here."""


@contextlib.contextmanager
def slurm_job(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The batch script of the docs, for two nodes of two GPUs."""
    found = re.search(r"```\w+\n(#!/bin/bash -l\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    (folder / "job.sh").write_text(found[1].replace(":29400", f":{free_port()}"))
    shutil.copy(SCRIPT, folder / "train.py")
    for name, content in (("scontrol", SCONTROL), ("srun", SRUN)):
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_GPUS_ON_NODE": "2"}
    environment = {**os.environ, **slurm, "PATH": path, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(["bash", "job.sh"], cwd=folder, env=environment, start_new_session=True)
    try:
        yield job
    finally:
        # Each torchrun ends its ranks when it is asked to end.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
        job.wait()


@pytest.mark.parametrize("victim", ["0-0", "1-1"])
def test_torchrun_restarts_the_replica_of_a_slurm_task_and_the_other_goes_on(victim: str, tmp_path: Path) -> None:
    ranks = ["0-0", "0-1", "1-0", "1-1"]
    restarted = [rank for rank in ranks if rank[0] == victim[0]]

    def read(rank: str) -> dict[str, int]:
        path = tmp_path / f"{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {"pid": 0, "steps": 0, "exchanges": 0}

    def wait_until(reached: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not reached():
            assert time.monotonic() < until, [log.read_text()[-2000:] for log in tmp_path.glob("task-*.log")]
            time.sleep(0.05)

    with slurm_job(tmp_path) as job:
        wait_until(lambda: all(read(rank)["exchanges"] > 2 for rank in ranks))
        before = {rank: read(rank) for rank in ranks}
        os.kill(before[victim]["pid"], signal.SIGKILL)
        for rank in restarted:
            wait_until(lambda rank=rank: read(rank)["pid"] != before[rank]["pid"] and read(rank)["exchanges"] > 0)  # type: ignore[misc]
        for rank in ranks:
            now = read(rank)
            if rank not in restarted:
                assert now["pid"] == before[rank]["pid"]
                assert now["steps"] > before[rank]["steps"]
        (tmp_path / "last").touch()
        assert job.wait(120) == 0
    assert sorted(path.stem for path in tmp_path.glob("*.done")) == ranks
