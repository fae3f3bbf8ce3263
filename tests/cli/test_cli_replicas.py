"""``gossamer train --replica-size``: replicas of several processes; their checkpoints, and ``gossamer export``."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from gossamer.errors import InputError
from gossamer.runs.status import WorkerStatus
from gossamer.train.replica.status import whole_status
from gossamer.train.replica.step_decision import SentDecisions, StepDecision

TASK = """
import os, pathlib, signal, time
import torch
from torch import nn
from gossamer import Task

died, back = pathlib.Path({folder!r}, "died"), pathlib.Path({folder!r}, "back")
came_back = died.exists()

def loss(outputs, targets):
    here = (os.environ.get("REPLICA"), os.environ.get("RANK"))
    if torch.is_grad_enabled() and {dies}:
        if here == ("1", "1") and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if here[0] == "1" and came_back:
            back.touch()
        # The other replica shall not be through before this one is back.
        until = time.monotonic() + 2
        while not back.exists() and died.exists() and time.monotonic() < until:
            time.sleep(0.01)
    return (outputs - targets).square().mean()

def task(workers, seed):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=draw)
    y = x @ torch.randn(6, 4, generator=draw)
    model = lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    return Task(name="lines", model=model, train=(x, y), test=(x, y), loss=loss, defaults={{"batch": 4}})
"""


@pytest.fixture
def task(tmp_path):
    def write(dies=False):
        (tmp_path / "lines.py").write_text(TASK.format(folder=str(tmp_path), dies=dies))
        return ("--task", "lines.py", "--workers", "2", "--replica-size", "2", "--lr", "0.05")

    return write


def test_the_status_of_a_replica_has_the_consensus_distance_of_its_ranks_and_the_sum_of_their_bytes():
    ranks = [WorkerStatus(1, consensus=3.0, bytes_sent=number) for number in (5, 6)]
    whole = whole_status(ranks[0], ranks[1:])
    assert (whole.consensus, whole.bytes_sent) == (3.0, 11)


COUNTING = """
import threading
from gossamer.process.replica.inner_group import InnerGroup

gather, counts, seen = InnerGroup.gather, [0], []

def counting(self, own):
    # The background thread compares what came of each exchange.
    counts[0] += threading.current_thread() is threading.main_thread()
    return gather(self, own)

InnerGroup.gather = counting

def note():
    # Evaluations are made together.
    if not torch.is_grad_enabled():
        return
    seen.append(counts[0])
    pathlib.Path({folder!r}, "-".join(os.environ[name] for name in ("REPLICA", "RANK"))).write_text(str(seen))
"""


@pytest.mark.parametrize(("method", "per_step"), [("gossip", 0), ("lasgd", 0), ("localsgd", 1)])
def test_ranks_of_methods_that_do_not_wait_make_steps_without_a_collective(method, per_step, gossamer, task, tmp_path):
    run = (*task(), "--method", method, "--steps", "60", "--compute", "5ms", "--eval-every", "3", "--json")
    source = (tmp_path / "lines.py").read_text().replace("    here = (", "    note()\n    here = (")
    (tmp_path / "lines.py").write_text(source + COUNTING.format(folder=str(tmp_path)))
    ran = gossamer("train", *run)
    assert ran.code == 0, ran.err
    (result,) = ran.document["results"]
    ranks = [rank["steps"] for status in result["worker_status"] for rank in status["ranks"]]
    # The ranks of a replica make every step together. Replicas share the steps out.
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert sum(ranks) == 2 * 120
    for place in ("0-0", "0-1", "1-0", "1-1"):
        counts = json.loads((tmp_path / place).read_text())
        # A replica of methods that do not wait may be left few steps.
        assert (len(set(counts[2:])) <= 1) == (per_step == 0), counts


class Ends:
    """Two watches that hear each other."""

    def __init__(self):
        self.on_message, self.gone, self.other = {}, "", None

    def send(self, message):
        kind, _, text = message.partition(" ")
        self.other.on_message[kind](text)


def test_a_rank_that_is_asked_to_stop_tells_the_first_one_whose_decisions_the_others_follow():
    ends = [Ends(), Ends()]
    ends[0].other, ends[1].other = ends[1], ends[0]
    first, second = (SentDecisions(SimpleNamespace(shard=shard, watch=end)) for shard, end in enumerate(ends))
    for decision in (StepDecision(True, evaluate=True), StepDecision(True, checkpoint=40)):
        assert first.agree(decision) == decision
        assert second.agree(StepDecision(True)) == decision
    first.agree(StepDecision(True))
    assert second.agree(StepDecision(True, stopping=True)) == StepDecision(True)
    assert first.agree(StepDecision(True)) == StepDecision(True, stopping=True)
    assert second.agree(StepDecision(True, stopping=True)) == StepDecision(True, stopping=True)
    ends[1].gone = "rank 0 of this replica died"
    with pytest.raises(InputError, match="rank 0 of this replica died"):
        second.agree(StepDecision(True))


def model(path):
    path = path / "model.safetensors" if path.is_dir() else path
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(path).items())])


def test_sharded_replicas_train_resume_and_are_exported(gossamer, task, tmp_path):
    run = (*task(), "--method", "localsgd", "--period", "3", "--optimizer", "adam", "--steps", "12", "--json")
    ran = gossamer("train", *run, "--inside", "fsdp", "--checkpoint-every", "6", "--out", "real")
    assert ran.code == 0
    (result,) = ran.document["results"]
    virtual = gossamer("simulate", *run, "--inside", "fsdp", "--out", "virtual").document["results"][0]
    # The ranks of a replica share the mini-batch that a virtual worker has.
    torch.testing.assert_close(model(tmp_path / "real"), model(tmp_path / "virtual"), rtol=1e-5, atol=1e-6)
    assert (result["samples"], result["loss"]) == (2 * 2 * 12 * 4, pytest.approx(virtual["loss"], rel=1e-4))
    for status in result["worker_status"]:
        assert [rank["steps"] for rank in status["ranks"]] == [12, 12]
        assert len({rank["pid"] for rank in status["ranks"]}) == 2
        assert status["bytes_sent"] == sum(rank["bytes_sent"] for rank in status["ranks"])
    assert (tmp_path / "real" / "workers" / "ranks" / "1-1.recording.json").exists()

    (reported,) = gossamer("report", "real", "--out", "report.html", "--json").document["runs"]
    rows = reported["workers"]["of_replicas"]
    assert [(row["worker"], row["rank"], row["steps"]) for row in rows] == [
        (0, 0, 12),
        (0, 1, 12),
        (1, 0, 12),
        (1, 1, 12),
    ]

    # Each rank continues from its own state: the same weights, to the bit.
    half = tmp_path / "real" / "checkpoints" / "12"
    assert {path.name for path in half.iterdir()} == {
        *("0.safetensors", "0-1.safetensors", "0.dcp", "1.safetensors", "1-1.safetensors", "1.dcp", "complete.json")
    }
    for name in ("again", "flat"):
        shutil.copytree(tmp_path / "real", tmp_path / name)
    assert gossamer("train", "--resume", "again/checkpoints/12", "--steps", "12").code == 0
    assert torch.equal(model(tmp_path / "again"), model(tmp_path / "real"))

    # Others start from the mean of the replicas.
    assert gossamer("export", "real/checkpoints/12", "--out", "mean.safetensors").code == 0
    each = []
    for rank in range(2):
        assert gossamer("export", half / f"{rank}.dcp", "--out", f"{rank}.safetensors").code == 0
        each.append({name.removeprefix("/model/"): tensor for name, tensor in load_file(f"{rank}.safetensors").items()})
    mean = load_file("mean.safetensors")
    for name, tensor in mean.items():
        torch.testing.assert_close(tensor, (each[0][name] + each[1][name]) / 2)
    other = ("--workers", "1", "--replica-size", "1", "--inside", "ddp", "--steps", "7", "--lr", "0", "--json")
    resumed = gossamer("train", "--resume", "flat/checkpoints/12", *other)
    assert resumed.document["results"][0]["steps"] == 7
    torch.testing.assert_close(load_file("flat/model.safetensors"), mean)

    assert gossamer("export", "real", "--out", "last.safetensors", "--json").document["out"] == "last.safetensors"
    assert torch.equal(model(tmp_path / "last.safetensors"), model(tmp_path / "real"))
    gossamer("export", "real", "--out", "last.safetensors").refused("is there already")


def test_a_rank_that_dies_ends_its_replica_and_restart_starts_it_again(gossamer, task, tmp_path):
    run = (*task(dies=True), "--method", "allreduce", "--steps", "60", "--compute", "5ms", "--restart", "--json")
    ran = gossamer("train", *run, "--out", "run")
    assert ran.code == 0
    (result,) = ran.document["results"]
    assert "worker 1 gone (killed by SIGKILL); going on with 1" in result["events"]
    assert "worker 1 started again" in result["events"]
    assert [status["steps"] for status in result["worker_status"]] == [60, 60]
    assert (result["workers_gone"], result["consensus"]) == ([], 0.0)
    # The output of the ranks of a replica is in files of their own.
    assert {path.stem for path in (tmp_path / "run" / "workers").glob("*.log")} <= {"0", "1", "0-1", "1-1"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (("--replica-size", "0"), ("--replica-size is 0",)),
        (("--replica-size", "two"), ("--replica-size", "a whole number")),
        (("--inside", "fsdp"), ("give --replica-size too",)),
        (("--replica-size", "2", "--inside", "tp"), ("--inside", "ddp, fsdp")),
        (("--replica-size", "2", "--task", "consensus", "--compute", "1ms"), ("consensus has no gradients",)),
        (("--replica-size", "2", "--listen", "127.0.0.1:29555"), ("no workers can come to a run of replicas",)),
        (("--replica-size", "2", "--wire", "bfloat16"), ("--wire does not work with --replica-size",)),
        (("--replica-link", "1gbit"), ("--replica-link", "gossamer simulate")),
        (("--replica-size", "2", "--method", "auto"), ("--method auto does not work with --replica-size",)),
        (
            ("--replica-size", "2", "--inside", "fsdp", "--method", "allreduce,divisible"),
            ("divisible compresses a gradient as a whole", "--inside ddp"),
        ),
    ],
)
def test_what_replicas_cannot_do_is_one_line(gossamer, wrong, words):
    gossamer("train", *wrong).refused(*words)


def test_a_mistake_that_only_a_rank_sees_is_one_line_too(gossamer, task, tmp_path):
    run = (*task(), "--steps", "3", "--inside", "fsdp")
    linear = "model = lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))"
    source = (tmp_path / "lines.py").read_text()
    assert linear in source
    (tmp_path / "lines.py").write_text(
        source.replace(linear, "model = Scaled").replace(
            "def task(",
            "class Scaled(nn.Linear):\n"
            "    def __init__(self):\n"
            "        super().__init__(6, 4)\n"
            "        self.factor = nn.Parameter(torch.ones(()))\n\n"
            "def task(",
        )
    )
    ran = gossamer("train", *run)
    assert ran.code == 2
    line = ran.err.splitlines()[-1]
    assert line.endswith("--inside fsdp cannot shard factor, a single number: take --inside ddp")


def test_a_launcher_starts_no_replicas(gossamer, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    gossamer("train", "--replica-size", "2").refused("gossamer.join with mesh=", "one torchrun per replica")


def test_the_model_of_a_checkpoint_of_ones_own_is_exported(gossamer, tmp_path):
    weights = {"tokens.weight": torch.randn(3, 2), "norm": torch.ones(5, dtype=torch.bfloat16)}
    state = {"model": weights, "optimizer": {"state": {"norm": {"exp_avg": torch.ones(5)}}}, "steps": 3}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "replica-0", no_dist=True)
    assert gossamer("export", "replica-0", "--out", "model.safetensors").code == 0
    torch.testing.assert_close(load_file("model.safetensors"), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere", "--out", "m"), "nowhere does not exist: expected the folder of a run"),
        ((".", "--out", "m"), ". has no model: expected the folder of a run"),
        (("bad", "--out", "m"), "which describes no tensor"),
        (("cut", "--out", "m"), "cannot be read"),
        ((".",), "--out is missing"),
        ((".", "--out", "no/m"), "in a folder that does not exist"),
    ],
)
def test_what_cannot_be_exported_is_one_line(gossamer, tmp_path, arguments, words):
    for name, content in {"bad": b"cos\nsystem\n(S'touch ran'\ntR.", "cut": b"\x80\x04"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(content)
    gossamer("export", *arguments).refused(words)
    assert not (tmp_path / "ran").exists()
