"""``gossamer simulate``: what it prints, as a table and as JSON."""

import math

import pytest

from gossamer.methods import METHODS

HEAD = {"method", "topology", "workers", "seed"}
FIGURES = {
    "steps",
    "samples",
    "time",
    "loss",
    "accuracy",
    "worker_accuracy",
    "consensus",
    "exchanges",
    "bytes_sent",
    "utilization",
    "wall_s",
}


@pytest.fixture(scope="module")
def digits():
    return ("simulate", "--task", "digits", "--workers", "5", "--steps", "4", "--batch", "8", "--seed", "3")


def test_json_is_one_document_with_every_field(gossamer, digits):
    ran = gossamer(*digits, "--method", ",".join(METHODS), "--json")
    assert ran.code == 0
    assert ran.err == ""
    assert ran.document["command"].startswith("gossamer simulate --task digits")
    results = ran.document["results"]
    assert [result["method"] for result in results] == list(METHODS)
    for result in results:
        assert set(result) >= HEAD | FIGURES | {"history", "interrupted"}
        assert (result["topology"], result["workers"], result["seed"]) == ("ring", 5, 3)
        assert result["steps"] == 4
        assert result["samples"] == 5 * 4 * 8
        assert set(result["worker_accuracy"]) == {"mean", "min", "max"}
        assert result["worker_accuracy"]["min"] <= result["worker_accuracy"]["mean"] <= result["worker_accuracy"]["max"]
        history = result["history"]
        for point in history:
            assert set(point) >= FIGURES
        # One at the start, one after every step of all workers, perhaps one after what was still in flight.
        assert len(history) in (5, 6)
        assert (history[0]["time"], history[0]["steps"], history[0]["exchanges"]) == (0.0, 0, 0)
        assert [point["steps"] for point in history[:5]] == [0, 1, 2, 3, 4]
        assert {name: history[-1][name] for name in FIGURES} == {name: result[name] for name in FIGURES}
        times = [point["time"] for point in history]
        assert times == sorted(times)


@pytest.mark.parametrize("method", METHODS)
def test_the_ideal_clock_has_a_point_at_the_start_and_one_per_unit(gossamer, quick, method):
    ran = gossamer(*quick, "--method", method, "--clock", "ideal", "--json")
    (result,) = ran.document["results"]
    assert [point["time"] for point in result["history"]][:4] == [0.0, 1.0, 2.0, 3.0]
    assert result["time"] == 3.0


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers(gossamer, workers):
    ran = gossamer(
        *("simulate", "--task", "quadratic", "--workers", workers, "--steps", "12", "--dim", "4"),
        *("--method", ",".join(METHODS), "--json"),
    )
    assert ran.code == 0
    for result in ran.document["results"]:
        assert result["steps"] == 12
        assert math.isfinite(result["loss"])
        if workers == 1:
            assert (result["exchanges"], result["bytes_sent"], result["consensus"]) == (0, 0, 0.0)


def test_the_table_compares_the_methods(gossamer, digits):
    ran = gossamer(*digits, "--method", "allreduce,gossip")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "digits, 5 workers, ring, hardware clock, seed 3"
    assert [line.split()[0] for line in lines[3:5]] == ["allreduce", "gossip"]
    assert "speed-up: steps per time, against allreduce" in " ".join(ran.out.split())
    assert all(line == line.rstrip() for line in lines)
    # How far it is goes to standard error.
    assert "gossip: 100%" in ran.err
    assert "100%  time" not in ran.out


def test_one_worker_is_not_one_workers(gossamer, quick):
    assert gossamer(*quick, "--workers", "1").out.startswith("quadratic, 1 worker, ring")


def test_epochs_instead_of_steps(gossamer):
    ran = gossamer("simulate", "--epochs", "0.1", "--workers", "3", "--batch", "16", "--json")
    # A tenth of 1,437 samples by 3 workers of 16 each.
    assert ran.document["results"][0]["steps"] == math.ceil(0.1 * 1437 / 48)


def test_the_same_seed_gives_the_same_run(gossamer, quick):
    def figures(seed):
        (result,) = gossamer(*quick, "--seed", seed, "--json").document["results"]
        for point in (result, *result["history"]):
            del point["wall_s"]
        return result

    assert figures(1) == figures(1)
    assert figures(1)["loss"] != figures(2)["loss"]


def test_failures_and_joins_are_reported(gossamer, quick):
    ran = gossamer(*quick, "--steps", "20", "--fail", "1@0.2", "--join", "1@0.5")
    assert ran.code == 0
    assert "worker 1 gone at 0.2" in ran.out
    assert "worker 1 joined at 0.5" in ran.out
    assert "worker 1 gone at 0.2" in ran.err


def test_a_stand_in_topology_is_announced(gossamer, quick):
    ran = gossamer(*quick, "--workers", "3", "--topology", "one-peer-exponential")
    assert "note: one-peer-exponential needs a power of two" in ran.err


DIVERGING = ("simulate", "--task", "digits", "--workers", "3", "--steps", "30", "--lr", "1e6", "--method", "gossip")


def test_a_diverged_run_reports_when_and_where_and_keeps_its_results(gossamer, tmp_path):
    ran = gossamer(*DIVERGING, "--out", "run")
    assert ran.code == 2
    message = ran.err.splitlines()[-1]
    assert message.startswith("gossamer: gossip diverged: the loss of worker ")
    assert "time" in message
    assert "--lr" in message
    assert "run" in message
    assert "gossip" in ran.out
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        *("run.json", "config.toml", "metrics.jsonl", "recording.json", "summary.json", "model.safetensors")
    }


def test_a_diverged_run_is_still_json(gossamer):
    ran = gossamer(*DIVERGING, "--method", "gossip,localsgd", "--json")
    assert ran.code == 2
    assert all(line.startswith("gossamer: ") for line in ran.err.splitlines())
    for result in ran.document["results"]:
        assert set(result["diverged"]) == {"time", "worker", "step"}
        assert len(result["history"]) >= 1
        assert result["steps"] < 30


def test_a_run_that_blows_up_in_its_last_step_has_diverged_too(gossamer):
    ran = gossamer("simulate", "--workers", "1", "--method", "allreduce", "--lr", "1e38", "--steps", "1", "--json")
    assert ran.code == 2
    assert "diverged" in ran.err
    assert len(ran.err.splitlines()) == 1
    (result,) = ran.document["results"]
    assert result["loss"] is None


def test_the_speed_of_an_incomplete_run_is_not_shown(gossamer):
    ran = gossamer(*DIVERGING, "--method", "gossip,localsgd")
    assert "×" not in ran.out


TASK = """
import torch
from torch import nn
from gossamer import Task

def task(workers: int, seed: int) -> Task:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 3, generator=rng)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]])
    return Task(
        name="line", model=lambda: nn.Linear(3, 1), train=(x, y), test=(x, y),
        loss=lambda outputs, targets: (outputs - targets).square().mean(), defaults={"lr": 0.1, "batch": 4},
    )
"""


def test_a_task_of_ones_own(gossamer, tmp_path):
    (tmp_path / "line.py").write_text(TASK)
    ran = gossamer("simulate", "--task", "line.py", "--workers", "3", "--steps", "40", "--json")
    assert ran.code == 0
    history = ran.document["results"][0]["history"]
    assert history[-1]["loss"] < 0.01 * history[0]["loss"]
    assert history[-1]["accuracy"] is None


def test_a_mistake_in_a_task_file_is_one_line_that_names_its_line(gossamer, tmp_path):
    (tmp_path / "broken.py").write_text("import gossamer\n\ndef task(workers, seed):\n    return nothing\n")
    gossamer("simulate", "--task", "broken.py").refused("broken.py, line 4", "NameError")
