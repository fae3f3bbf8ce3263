"""Probing: how measurements are reduced; real workers that measure, die during it, or train with the winner."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gossamer.cli import main
from gossamer.errors import InputError
from gossamer.plan import cluster_file
from gossamer.plan.cluster_spec import GroupShape
from gossamer.plan.probe.findings import compute_profile, correlation
from gossamer.plan.probe.message_timer import message_sizes
from gossamer.plan.probe.session import _nodes
from gossamer.plan.recommend import Workload, make_plan
from gossamer.process.store.rank_info import free_port

PROBE = (
    *("probe", "--task", "quadratic", "--dim", "20000", "--compute", "constant:10ms"),
    *("--workers", "3", "--straggler", "2:3"),
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


def gossamer(*arguments, cwd, **started):
    return subprocess.Popen(
        [sys.executable, "-m", "gossamer", *map(str, arguments)],
        env={**ENVIRONMENT, **started},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_slow_workers_get_a_factor():
    rng = np.random.default_rng(0)
    typical = [list(0.1 * np.exp(0.1 * rng.standard_normal(400))) for _ in range(4)]
    typical[2] = [3 * time for time in typical[2]]
    profile = compute_profile(typical, typical, [0.6] * 4)
    assert profile.factors == pytest.approx((1, 1, 3, 1), rel=0.05)
    assert profile.mean_s == pytest.approx(0.1, rel=0.03)
    assert np.std(np.log(profile.sample_s)) == pytest.approx(0.1, rel=0.1)
    assert profile.backward_s == pytest.approx(0.06, rel=0.03)
    assert profile.correlation == pytest.approx(0, abs=0.05)
    assert len(profile.sample_s) == 200


def test_noise_makes_no_worker_slow():
    profile = compute_profile([[0.1, 0.1, 0.1], [0.102, 0.102, 0.102]], [[0.1]] * 2, [0.5, 0.5])
    assert profile.factors == ()


def test_correlation_of_workers_that_are_slow_together():
    rng = np.random.default_rng(0)
    common = rng.standard_normal(500)
    times = [np.exp(common + rng.standard_normal(500)) for _ in range(3)]
    assert correlation(times) == pytest.approx(0.5, abs=0.07)
    assert correlation([np.ones(20), np.ones(20)]) == 0.0


def test_message_sizes_go_from_4_kb_to_the_model():
    assert message_sizes(4_000_000, "mean", all_workers=False) == [4096, 32768, 262144, 2097152, 4_000_000]
    assert message_sizes(4_000_000, "mean", all_workers=True)[-1] == 8_000_000
    assert message_sizes(4_000_000, "gather", all_workers=True) == [4096, 32768, 250_000]
    assert message_sizes(40, "exchange", all_workers=False) == [4096, 32768]


def test_nodes_need_equally_many_consecutive_workers():
    assert _nodes(["a", "a", "b", "b"]) == [0, 0, 1, 1]
    for strange in (["a", "b", "a", "b"], ["a", "a", "b"]):
        with pytest.raises(InputError, match="as many on each node"):
            _nodes(strange)


def test_a_probe_writes_a_file_for_the_planner(tmp_path):
    out, err = (process := gossamer(*PROBE, "--seconds", "3", "--json", cwd=tmp_path)).communicate(timeout=200)
    assert process.returncode == 0, err
    document = json.loads(out)
    spec = cluster_file.read(tmp_path / "cluster.toml")
    assert document["cluster"]["workers_per_node"] == spec.per_node == 3
    # Three, on a machine with nothing else to do.
    assert spec.compute.factors[2] > 1.5
    assert spec.compute.mean_s >= 0.01
    assert spec.parameters == 20_000
    assert spec.costs.slowdown >= 1
    shapes = {(table.kind, table.shape) for table in spec.tables}
    assert shapes >= {
        ("exchange", GroupShape(2, 1, 1)),
        ("mean", GroupShape(3, 1, 1)),
        ("mean", GroupShape(2, 1, 1)),
        ("gather", GroupShape(3, 1, 1)),
        ("gather beside a mean", GroupShape(3, 1, 1)),
    }
    plan = make_plan(spec, Workload("quadratic", spec.parameters))
    assert plan.winner.step_s > 0
    assert not plan.notes


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_a_probe_that_loses_a_worker_reports_it_and_writes_what_it_has(tmp_path):
    process = gossamer(*PROBE, "--seconds", "60", cwd=tmp_path)
    for line in process.stderr:
        if "messages" in line:
            break
    # The fork server, a child of the command, has forked the three workers in the order of their ranks.
    (workers,) = [pids for child in children(process.pid) if len(pids := children(child)) == 3]
    os.kill(workers[1], signal.SIGKILL)
    out, err = process.communicate(timeout=250)
    assert process.returncode == 1
    assert out == ""
    last = [line for line in err.splitlines() if line.startswith("gossamer: ")]
    assert last, err
    assert last == [
        "gossamer: worker 1 was lost while measuring messages: " + last[0].partition("messages: ")[2],
    ]
    assert "compute times" in last[0]
    assert last[0].endswith("in cluster.partial.toml")
    assert "worker 1 was lost" in (tmp_path / "cluster.partial.toml").read_text()
    assert not (tmp_path / "cluster.toml").exists()


def test_train_with_auto_prints_its_choice(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ("--task", "quadratic", "--compute", "constant:5ms", "--workers", "2", "--steps", "20", "--json")
    assert main(["train", "--method", "auto", *arguments]) == 0
    out, err = capsys.readouterr()
    (verdict,) = [line for line in err.splitlines() if line.startswith(("auto: Take", "auto: Stay"))]
    (result,) = json.loads(out)["results"]
    assert f" {result['method']}" in verdict.replace("all-reduce", "allreduce")
    assert result["total_steps"] == 40


JOINED = """
import torch
import gossamer

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x = torch.randn(32, 4)
y = x.sum(1, keepdim=True)
before = [p.clone() for p in model.parameters()]
swarm = gossamer.join(model, optimizer, method="auto", loss=lambda: torch.nn.functional.mse_loss(model(x), y))
assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))
print([str(event) for event in swarm.events if event.kind == 'chosen'][0])
for _ in range(60):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
swarm.finish()
assert float(torch.nn.functional.mse_loss(model(x), y)) < 0.5
print("done")
"""


def test_join_with_auto_probes_restores_the_model_and_trains(tmp_path):
    (tmp_path / "loop.py").write_text(JOINED)
    session = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    workers = [
        subprocess.Popen(
            [sys.executable, "loop.py"],
            env={**ENVIRONMENT, **session, "RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    for worker in workers:
        out, err = worker.communicate(timeout=250)
        assert worker.returncode == 0, err
        assert out.endswith("done\n")
        outputs.append(out)
    assert outputs[0] == outputs[1]


def test_join_with_auto_asks_for_a_loss():
    import torch

    import gossamer as library

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="loss=lambda"):
        library.join(model, optimizer, method="auto")
    with pytest.raises(InputError, match="leave them out"):
        library.join(model, optimizer, method="auto", loss=lambda: model(torch.ones(2)).sum(), rate=2)


def test_waiting_for_a_worker_that_never_starts_ends(tmp_path, monkeypatch):
    from gossamer.plan.probe import session
    from gossamer.process.store.rank_info import RankInfo

    monkeypatch.setattr(session, "START_TIMEOUT_S", 0.5)
    with pytest.raises(session.WorkerLost, match="worker 1"):
        session.ProbeSession(RankInfo(0, 2, "127.0.0.1", free_port(), "alone/"))
