"""Real training on two hosts that are joined by slow links, started with torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer
from hosts import Hosts, Unavailable

SCRIPT = Path(__file__).with_name("hosts_script.py")
PARAMETERS_BYTES = 4 * (16 * 256 + 256 + 256 * 256 + 256 + 256 * 4 + 4)


@pytest.fixture
def hosts():
    try:
        with Hosts(2, rate_mbit=200) as made:
            yield made
    except Unavailable as why:
        pytest.skip(str(why))


METHODS = ("allreduce", "overlap", "a2cid2", "lasgd", "sgp")
"""One of each kind: means and gathers in the step, pairwise exchanges, means in the background, shifts."""


def test_every_kind_of_method_trains_across_hosts(hosts: Hosts) -> None:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(gossamer.__file__).parents[1])}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", hosts.address(0), "--master-port", "29500"]
    jobs = [
        hosts.start(host, [*torchrun, "--node-rank", str(host), str(SCRIPT), *METHODS], environment, subprocess.PIPE)
        for host in range(2)
    ]
    try:
        outputs = [job.communicate(timeout=250)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(outputs)[-2000:]
    reports = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith('{"method"')]
    for method in METHODS:
        of_method = [report for report in reports if report["method"] == method]
        assert sorted(report["rank"] for report in of_method) == [0, 1, 2, 3]
        assert {report["host"] for report in of_method} == {0, 1}
        assert len({report["weights"] for report in of_method}) == 1
        assert all(report["accuracy"] > 0.95 and report["exchanges"] > 0 for report in of_method), of_method
    # All-reduce alone sends half of what travels in its ring over the links: 60 gradients, once each way.
    assert min(hosts.sent_bytes(host) for host in range(2)) > 60 * PARAMETERS_BYTES
