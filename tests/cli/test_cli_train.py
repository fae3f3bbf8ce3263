"""``gossamer train``: real workers started by the command, watched, slowed down, killed and stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gossamer.process.store.rank_info import free_port
from gossamer.seeds import stream
from gossamer.train.pacing import EvalSchedule

QUADRATIC = ("--task", "quadratic", "--dim", "8", "--lr", "0.05", "--workers", "3", "--steps", "20")


def model(folder):
    return torch.cat([tensor.flatten() for tensor in load_file(folder / "model.safetensors").values()])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_methods_that_wait_give_what_the_virtual_cluster_gives(gossamer, tmp_path):
    methods = ("--method", "allreduce,overlap")
    real = gossamer("train", *QUADRATIC, *methods, "--out", "real", "--json").document
    virtual = gossamer("simulate", *QUADRATIC, *methods, "--out", "virtual", "--json").document
    for ours, theirs in zip(real["results"], virtual["results"], strict=True):
        torch.testing.assert_close(
            model(tmp_path / "real" / ours["method"]),
            model(tmp_path / "virtual" / ours["method"]),
            rtol=1e-5,
            atol=1e-6,
        )
        # The same document, and more.
        assert theirs.keys() <= ours.keys()
        assert ours["worker_steps"] == {"mean": 20, "min": 20, "max": 20}
        assert (ours["loss"], ours["total_steps"]) == (pytest.approx(theirs["loss"], rel=1e-5), 60)


def test_a_run_leaves_a_folder_with_every_workers_figures(gossamer, tmp_path):
    ran = gossamer("train", *QUADRATIC, "--method", "allreduce", "--out", "run", "--json")
    assert ran.code == 0
    (result,) = ran.document["results"]
    history = result.pop("history")
    folder = tmp_path / "run"
    assert json.loads((folder / "summary.json").read_text()) == result
    assert lines(folder / "metrics.jsonl") == history
    for rank, report in enumerate(result["worker_status"]):
        last = lines(folder / "workers" / f"{rank}.jsonl")[-1]
        assert (last["rank"], last["steps"], last["state"]) == (rank, 20, "done")
        assert report["own_loss"] == pytest.approx(result["loss"], rel=1e-5)
        assert 0 < report["seconds"] <= result["time"]
    # Nothing was printed by the workers, so there is no log.
    assert not list((folder / "workers").glob("*.log"))
    # A simulation can be run from the settings of a real run, and the other way round.
    assert gossamer("simulate", "--config", "run/config.toml", "--json").code == 0


def test_fast_workers_make_the_steps_of_slow_ones(gossamer):
    ran = gossamer(
        *("train", "--task", "quadratic", "--workers", "3", "--steps", "40", "--method", "gossip"),
        *("--compute", "10ms", "--straggler", "1:8", "--json"),
    )
    (result,) = ran.document["results"]
    steps = [report["steps"] for report in result["worker_status"]]
    assert sum(steps) == 120
    # An eighth as fast: about 7 of them; an equal share would be 40.
    assert steps[1] < 20
    # At least as long as was asked for, for each of them.
    assert all(report["seconds"] >= 0.01 * report["steps"] for report in result["worker_status"])
    assert result["worker_status"][1]["seconds"] >= 0.08 * steps[1]


def test_workers_that_only_average_start_apart_and_meet_in_the_middle(gossamer, tmp_path):
    ran = gossamer(
        *("train", "--task", "consensus", "--workers", "3", "--steps", "8", "--method", "localsgd", "--period", "8"),
        *("--compute", "2ms", "--out", "run", "--json"),
    )
    (result,) = ran.document["results"]
    assert (result["loss"], result["accuracy"], result["samples"], result["consensus"]) == (None, None, 0, 0.0)
    starts = [stream(0, "start", rank).standard_normal(64) for rank in range(3)]
    torch.testing.assert_close(
        model(tmp_path / "run"), torch.tensor(np.stack(starts)).float().mean(0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--worker", "3"), ("unknown option --worker", "did you mean --workers?")),
        (("--clock", "ideal"), ("--clock", "gossamer simulate")),
        (("--link", "1gbit"), ("--link", "gossamer simulate")),
        (("--fail", "1@2"), ("--fail", "gossamer simulate")),
        (("--straggler", "1:0.5"), ("--straggler", "slowed down")),
        (("--straggler", "9:2"), ("--straggler names worker 9",)),
        (("--compute", "soon"), ("--compute",)),
        (("--task", "consensus"), ("--compute 10ms",)),
        (("--workers", "0"), ("--workers is 0",)),
        (("--out", ""), ("--out is empty",)),
        (("--device", "tpu"), ("--device",)),
    ],
)
def test_what_cannot_be_used_is_one_line(gossamer, wrong, words):
    gossamer("train", *wrong).refused(*words)


def test_a_folder_that_holds_a_run_is_not_written_over(gossamer):
    assert gossamer("train", *QUADRATIC, "--workers", "1", "--out", "run").code == 0
    gossamer("train", *QUADRATIC, "--out", "run").refused("run already contains a run")


def test_the_help_shows_only_what_applies(gossamer):
    shown = gossamer("train", "--help").out
    assert "--straggler" in shown
    assert "--restart" in shown
    for option in ("--clock", "--slow-link", "--fail", "--gradient-backend"):
        assert option not in shown


def test_a_run_that_diverges_is_reported(gossamer):
    ran = gossamer("train", "--task", "quadratic", "--workers", "2", "--steps", "5000", "--lr", "1e10", "--json")
    assert ran.code == 2
    assert "a2cid2 diverged" in ran.err
    assert "try a smaller --lr than 1e+10" in ran.err
    (result,) = ran.document["results"]
    assert result["diverged"]["step"] < 5000


BREAKS = """
import os, pathlib, time
import torch
from gossamer import Task

failed = pathlib.Path({folder!r}, "failed")

def loss(outputs, targets):
    if os.environ.get("RANK") in {ranks} and torch.is_grad_enabled():
        failed.touch()
        raise KeyError("no such thing")
    # Workers that do not wait for each other would be through before the one that fails has made a step.
    while torch.is_grad_enabled() and not failed.exists():
        time.sleep(0.01)
    return (outputs - targets).square().mean()

x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
task = Task(name="breaks", model=lambda: torch.nn.Linear(2, 1), train=(x, x[:, :1]), test=(x, x[:, :1]), loss=loss)
"""


def test_a_worker_that_fails_is_reported_in_one_line_and_the_others_continue(gossamer, tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS.format(ranks={"1"}, folder=str(tmp_path)))
    ran = gossamer("train", "--task", "breaks.py", "--workers", "3", "--steps", "20", "--out", "run")
    assert ran.code == 0
    messages = [line for line in ran.err.splitlines() if "no such thing" in line]
    assert messages == ["a2cid2: worker 1 gone (KeyError: 'no such thing' (breaks.py, line 11)); going on with 2"], (
        ran.err
    )
    assert "Traceback" not in ran.err
    assert "Traceback" in (tmp_path / "run" / "workers" / "1.log").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["workers_gone"] == [1]


def test_when_all_workers_fail_there_is_no_result(gossamer, tmp_path):
    (tmp_path / "breaks.py").write_text(BREAKS.format(ranks={"0", "1"}, folder=str(tmp_path)))
    ran = gossamer("train", "--task", "breaks.py", "--workers", "2", "--steps", "20")
    assert ran.code == 1
    assert ran.out == ""
    assert ran.err.splitlines()[-1].startswith("gossamer: a2cid2: no worker is left: KeyError: 'no such thing'")


# With real processes of the command itself.


LONG = ("train", "--task", "quadratic", "--workers", "3", "--steps", "100000", "--compute", "5ms", "--out", "run")


@pytest.fixture
def running(command, tmp_path):
    """Start ``gossamer …`` and wait until its workers train."""
    started = []

    def start(*arguments):
        program, environment = command
        process = subprocess.Popen(
            [*program, *arguments],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (
            metrics.exists()
            and metrics.read_text().count("\n") > 2
            and len(list((tmp_path / "run" / "workers").glob("*.jsonl"))) == 3
        ):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def workers_of(folder):
    return [lines(path)[0]["pid"] for path in sorted((folder / "workers").glob("*.jsonl"))]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_gone(pids, within_s=60.0):
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.parametrize(("method", "how"), [("allreduce", "terminal"), ("a2cid2", signal.SIGTERM)])
def test_ctrl_c_ends_all_workers_and_leaves_a_checkpoint(running, gossamer, tmp_path, method, how):
    process = running(*LONG, "--method", method)
    pids = workers_of(tmp_path / "run")
    if how == "terminal":
        os.killpg(process.pid, signal.SIGINT)
    else:
        # Only to the command, as a launcher does.
        process.send_signal(how)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("gossamer: stopped after ")
    assert "Traceback" not in out + err
    assert len(pids) == 3
    assert all_gone(pids)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["loss"] is not None
    assert (tmp_path / "run" / "model.safetensors").exists()
    if method != "a2cid2":
        # No worker waited in a step that the others never did.
        assert summary["worker_steps"]["min"] == summary["worker_steps"]["max"]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(checkpoint.name) <= summary["total_steps"]
    assert json.loads((checkpoint / "complete.json").read_text())["ranks"] == [0, 1, 2]
    if how == "terminal":
        goal = str(summary["steps"] + 5)
        (result,) = gossamer("train", "--resume", "run", "--steps", goal, "--json").document["results"]
        assert result["worker_steps"]["max"] == summary["steps"] + 5


def test_workers_end_when_the_command_is_killed(running, tmp_path):
    process = running(*LONG, "--method", "gossip")
    pids = workers_of(tmp_path / "run")
    process.kill()
    process.communicate()
    assert all_gone(pids)


KILLED = """
import os, pathlib, signal, time
import torch
from gossamer import Task

first, back = pathlib.Path({folder!r}, "first"), pathlib.Path({folder!r}, "back")
steps = 0

def loss(outputs, targets):
    global steps
    steps += torch.is_grad_enabled()
    if os.environ.get("RANK") == "1" and torch.is_grad_enabled():
        if not first.exists():
            first.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        back.touch()
    # The others make a few steps and wait until it is back.
    while steps > 3 and not back.exists():
        time.sleep(0.01)
    return (outputs - targets).square().mean()

x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
task = Task(name="killed", model=lambda: torch.nn.Linear(2, 1), train=(x, x[:, :1]), test=(x, x[:, :1]), loss=loss)
"""


def test_a_killed_worker_is_started_again(gossamer, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED.format(folder=str(tmp_path)))
    ran = gossamer("train", "--task", "killed.py", "--workers", "3", "--steps", "40", "--out", "run", "--restart")
    err = ran.err
    assert ran.code == 0
    assert "a2cid2: worker 1 gone (killed by SIGKILL); going on with 2" in err.splitlines()
    assert "a2cid2: worker 1 started again" in err.splitlines()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["workers_gone"] == []
    assert summary["worker_status"][1]["state"] == "done"
    assert any("took over the weights" in events for events in summary["events"])
    # The others notice it too, but the command has said so already.
    assert not any("cannot be reached" in line or "is back" in line for line in err.splitlines())


def test_under_torchrun_the_command_joins(command, tmp_path):
    _, environment = command
    ran = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
                "--master-port",
                str(free_port()),
            ),
            *("-m", "gossamer", "train", "--task", "quadratic", "--steps", "20", "--method", "allreduce,gossip"),
            *("--out", "run", "--json"),
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout)["results"]
    assert [(result["method"], result["workers"], result["total_steps"]) for result in results] == [
        ("allreduce", 2, 40),
        ("gossip", 2, 40),
    ]
    for result in results:
        assert [report["state"] for report in result["worker_status"]] == ["done", "done"]
        folder = tmp_path / "run" / result["method"]
        assert json.loads((folder / "summary.json").read_text())["loss"] == result["loss"]
        assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ("MASTER_ADDR", "torchrun")),
        ({"RANK": "two", "WORLD_SIZE": "2"}, ("RANK is 'two'",)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ("rank is 2 of 2 workers",)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("--workers is 3, but 1 were started",)),
    ],
)
def test_an_environment_that_makes_no_sense_is_one_line(gossamer, monkeypatch, variables, words):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    gossamer("train", "--workers", "3").refused(*words)


def test_workers_evaluate_on_the_test_set_from_time_to_time(gossamer):
    ran = gossamer(
        *("train", "--workers", "2", "--steps", "100", "--method", "gossip", "--compute", "20ms", "--json"),
        *("--eval-every", "20"),
    )
    (result,) = ran.document["results"]
    seen = [point["worker_accuracy"]["mean"] for point in result["history"] if point["worker_accuracy"] is not None]
    seen = [accuracy for accuracy in seen if accuracy is not None]
    assert len(seen) > 1
    assert seen[0] < seen[-1]


def test_expensive_evaluations_are_rare():
    schedule = EvalSchedule(every=0, workers=4)
    assert not schedule.due(now=1e9, step=1000)
    for guess in (5.0, 0.1, 0.2):
        schedule.estimate(now=10.0, cost_s=guess)
    assert not schedule.due(now=49.9, step=1)
    assert schedule.due(now=50.1, step=1)
    assert schedule.estimating
    schedule.evaluated(now=51.0, cost_s=0.2)
    assert not schedule.estimating
    assert not schedule.due(now=130.0, step=1)
    assert schedule.due(now=131.5, step=1)
    assert [step for step in range(1, 13) if EvalSchedule(every=5, workers=4).due(now=0.0, step=step)] == [5, 10]


def until(happened, within_s=300.0):
    deadline = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def newest(folder, rank):
    path = folder / "workers" / f"{rank}.jsonl"
    found = lines(path) if path.exists() else []
    return found[-1] if found else {"state": "", "steps": 0}


def test_a_worker_comes_from_another_shell_and_workers_leave_for_good(running, command, tmp_path):
    run = tmp_path / "run"
    process = running(*LONG, "--method", "a2cid2", "--listen", f"127.0.0.1:{free_port()}")
    secret, *program = process.stderr.readline().partition("to add workers: ")[2].split()
    assert program[:3] == ["gossamer", "train", "--join"]
    environment = {**command[1], **dict([secret.split("=")])}
    (tmp_path / "elsewhere").mkdir()
    newcomer = subprocess.Popen(
        [*command[0], *program[1:]],
        env=environment,
        cwd=tmp_path / "elsewhere",
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: newest(run, 3)["steps"] > 10)
        # As the machine of worker 1 does when it is taken away.
        os.kill(lines(run / "workers" / "1.jsonl")[0]["pid"], signal.SIGTERM)
        until(lambda: newest(run, 1)["state"] == "left")
        newcomer.send_signal(signal.SIGINT)
        _, said = newcomer.communicate(timeout=200)
        assert newcomer.returncode == 0, said
        assert "left the run, which goes on" in said
    finally:
        if newcomer.poll() is None:
            os.killpg(newcomer.pid, signal.SIGKILL)
            newcomer.wait()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    summary = json.loads((run / "summary.json").read_text())
    for event in ("worker 3 has come to the run", "worker 1 has left for good", "worker 3 has left for good"):
        assert event in summary["events"]
    assert [status["state"] for status in summary["worker_status"]] == ["done", "left", "done", "left"]
    assert summary["workers_gone"] == []


def test_upon_sigterm_one_of_the_workers_of_another_launcher_leaves_for_good(command, tmp_path):
    program, environment = command
    environment = {**environment, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = (*program, *LONG, "--workers", "2", "--method", "allreduce", "--leave-on-sigterm")
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    workers = []
    for rank, log in enumerate(logs):
        with log.open("wb") as file:
            worker = subprocess.Popen(arguments, env={**environment, "RANK": str(rank)}, cwd=tmp_path, stderr=file)
        workers.append(worker)
    run = tmp_path / "run"
    try:
        until(lambda: min(newest(run, rank)["steps"] for rank in range(2)) > 10)
        workers[1].send_signal(signal.SIGTERM)
        assert workers[1].wait(300) == 0, logs[1].read_text()
        steps = newest(run, 0)["steps"]
        until(lambda: newest(run, 0)["steps"] > steps + 10)
        # It watches the run for all: it does not leave.
        workers[0].send_signal(signal.SIGTERM)
        assert workers[0].wait(300) == 130, logs[0].read_text()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    summary = json.loads((run / "summary.json").read_text())
    assert "worker 1 has left for good" in summary["events"]
    assert [status["state"] for status in summary["worker_status"]] == ["done", "left"]
