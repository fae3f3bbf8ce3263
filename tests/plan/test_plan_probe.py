"""Probing: how measurements are reduced; real workers that measure, die during it, or train with the winner."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gossamer.cli import main
from gossamer.cli.commands.probe import of_replicas
from gossamer.errors import InputError
from gossamer.plan import cluster_file
from gossamer.plan.cluster_spec import ComputeProfile, GroupShape
from gossamer.plan.probe import session
from gossamer.plan.probe.findings import compute_profile, correlation, waited_s
from gossamer.plan.probe.message_timer import MessageTimer, message_sizes
from gossamer.plan.probe.prober import MAX_STEPS, MIN_STEPS, NUM_WARM_UP_STEPS, Prober
from gossamer.plan.probe.replica_steps import check_replicas, ring_link
from gossamer.plan.probe.session import ProbeSession, _nodes
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


def test_a_replica_waits_for_what_its_steps_take_beyond_its_slowest_rank():
    # Rank 3 is slow, so the second replica is; and every step of both takes 5 ms more.
    compute = ComputeProfile(mean_s=0.1, factors=(1.0, 1.0, 1.0, 2.0))
    assert waited_s(compute, [0.105, 0.105, 0.205, 0.205], 2) == pytest.approx(0.005)
    assert waited_s(compute, [0.1, 0.1, 0.2, 0.2], 2) == pytest.approx(0.0)
    # The larger of two random times is longer than the mean; that is no waiting for messages.
    spread = ComputeProfile(mean_s=0.1, sample_s=(0.05, 0.15))
    assert waited_s(spread, [0.13, 0.13], 2) == pytest.approx(0.005, abs=0.002)


def test_counterparts_of_replicas_communicate_all_at_once():
    # Two nodes of two replicas of two ranks: ranks 0 to 3 are on the first node.
    session = SimpleNamespace(rank=5, workers=8)
    timer = MessageTimer(session, nodes=2, vector_bytes=4000, replica_size=2)
    assert timer.counterparts == (1, 3, 5, 7)
    rounds = {(kind, shape): groups for kind, shape, groups in timer._rounds()}
    # A pair alone, inside a node and between nodes: of different replicas.
    assert rounds["exchange", GroupShape(2, 1, 1)] == [(0, 2)]
    assert rounds["exchange", GroupShape(2, 2, 1)] == [(0, 4)]
    assert rounds["mean", GroupShape(4, 2, 2)] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert rounds["gather", GroupShape(4, 2, 2)] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert rounds["mean", GroupShape(2, 1, 2)] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    # What no round has alone: one link of a replica without the other.
    assert not any(shape.at_once % 2 for kind, shape in rounds if kind == "mean")


def test_replicas_of_a_probe_lie_within_nodes_and_divide_what_was_started():
    session = SimpleNamespace(workers=6, node_of=[0, 0, 0, 1, 1, 1])
    check_replicas(session, 3)
    with pytest.raises(InputError, match="--replica-size is 2: expected a divisor of the 3 ranks of a node"):
        check_replicas(session, 2)
    assert of_replicas({"replica_size": "2"}, 6) == {"replica_size": "2", "workers": 3}
    assert of_replicas({"task": "digits"}, 6) == {"task": "digits"}
    for values, words in (
        ({"replica_size": "4"}, "--replica-size is 4, but 6 processes were started"),
        ({"replica_size": "two"}, "--replica-size"),
        ({"replica_size": "2", "workers": "6"}, "--workers is 6, but 6 processes were started, 3 replicas of 2"),
    ):
        with pytest.raises(InputError, match=words):
            of_replicas(values, 6)


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


@pytest.mark.parametrize("ranks", [2, 8])
def test_latency_and_bandwidth_of_a_ring_from_two_messages(ranks):
    sizes, latency_s, bytes_per_s = (64_000, 4_000_000), 0.0003, 2e9
    # In each of its steps a rank sends one part to the next.
    times = [(ranks - 1) * (latency_s + size / ranks / bytes_per_s) for size in sizes]
    link = ring_link(ranks, sizes, times)
    assert link.latency_s == pytest.approx(latency_s)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)
    # A short message that took longer than the long one says nothing about latency.
    assert ring_link(ranks, sizes, (0.01, 0.008)).latency_s >= 0
    assert ring_link(ranks, (64_000, 4_000_000), (0.0, 0.008)).latency_s == 0


def test_a_probe_of_replicas_measures_inside_and_between(tmp_path):
    options = ("--task", "digits", "--compute", "constant:10ms", "--workers", "2", "--replica-size", "2")
    process = gossamer("probe", *options, "--inside", "fsdp", "--seconds", "2", "--json", cwd=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert json.loads(out)["replica"]["wait"] >= 0
    spec = cluster_file.read(tmp_path / "cluster.toml")
    assert (spec.per_node, spec.ranks) == (2, 4)
    assert (spec.replica.ranks, spec.replica.inside, spec.replica.overlaps) == (2, "fsdp", False)
    assert spec.replica.blocks > 1
    assert spec.replica.link.latency_s >= 0
    assert spec.replica.measured_bytes == 4 * spec.parameters
    # Each rank of a replica sends half of the model.
    means = [table for table in spec.tables if (table.kind, table.shape) == ("mean", GroupShape(2, 1, 2))]
    assert [table.sizes_bytes[-2] for table in means] == [max(2 * spec.parameters, 8 * 4096)]
    plan = make_plan(spec, Workload("digits", spec.parameters), replicas=[(2, "fsdp")])
    predicted = [prediction.step_s for prediction in plan.ranking if prediction.replica == spec.replica]
    assert min(predicted) > spec.compute.mean_s


class Alone(ProbeSession):
    """A session with nobody else, or with a worker that is dead."""

    def __init__(self, dead=()):
        self.rank, self.workers, self.dead = 0, 2, list(dead)
        self.announced = []

    def _dead(self):
        return self.dead

    def _announce_loss(self, lost):
        self.announced.append(lost)


def fail(error):
    raise error


def test_an_error_of_the_users_own_step_is_not_taken_for_a_lost_worker(monkeypatch):
    monkeypatch.setattr(session, "Timing", lambda: SimpleNamespace(dead_s=0.05))
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        Alone().guarded(lambda: fail(RuntimeError("Expected to have finished reduction in the prior iteration")))
    with pytest.raises(session.WorkerLost, match="worker 1"):
        Alone(dead=[1]).guarded(lambda: fail(RuntimeError("Connection closed by peer")))
    # Nobody's death is behind that, so there is nothing to wait for.
    with pytest.raises(torch.OutOfMemoryError):
        Alone(dead=[1]).guarded(lambda: fail(torch.OutOfMemoryError("out of memory")))
    alone = Alone()
    alone.group = lambda members, channel: None
    for error, expected in ((torch.OutOfMemoryError("out of memory"), torch.OutOfMemoryError),
                            (RuntimeError("Connection closed by peer"), session.WorkerLost)):  # fmt: skip
        with pytest.raises(expected):
            alone._collective((0, 1), "", lambda group, error=error: fail(error))


@pytest.mark.parametrize(
    ("step_s", "others_s", "expected"),
    [(0.1, 0.2, 22), (0.2, 0.1, 22), (3.0, 3.0, MIN_STEPS), (0.001, 0.001, MAX_STEPS)],
)
def test_a_replicas_steps_fit_into_the_time_that_they_take_together(step_s, others_s, expected):
    """In a replica a step also takes what its ranks send: those of a rank alone say nothing of that."""
    made = []

    class Two(Alone):
        def barrier(self):
            pass

        def share(self, what, value, timeout_s=0.0):
            return [value, [NUM_WARM_UP_STEPS * others_s, others_s]]

    prober = SimpleNamespace(session=Two(), findings=SimpleNamespace(compute=SimpleNamespace(mean_s=0.001)))
    inside = SimpleNamespace(timed_step=lambda number: made.append(number) or step_s)
    times = Prober._replica_steps(prober, inside, 5.0)
    assert len(times) == expected
    assert made == list(range(NUM_WARM_UP_STEPS + expected))


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


def test_train_with_auto_and_a_target_trains_candidates_and_takes_the_winner(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ("--compute", "constant:5ms", "--workers", "2", "--steps", "20", "--batch", "16", "--json")
    target = ("--until", "accuracy=0.3", "--budget", "30s")
    assert main(["train", "--method", "auto", "--task", "digits", *arguments, *target]) == 0
    out, err = capsys.readouterr()
    assert "auto: training candidates to accuracy 0.3 for up to 30 s" in err
    (verdict,) = [line for line in err.splitlines() if line.startswith(("auto: Take", "auto: Stay"))]
    assert "accuracy 0.3" in verdict
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
