"""``--checkpoint-every`` and ``--resume``: a run goes on where it was, on as many workers or on others."""

import contextlib
import json
import re
import resource
import shutil
import subprocess

import pytest
import torch
from safetensors.torch import load_file

from gossamer.cli import main
from gossamer.report.recordings import read_recording
from gossamer.train.checkpoint import Layout, find_checkpoint, read_state, write_state

LOCKSTEP = ("allreduce", "diloco", "divisible", "overlap")
"""Of the methods that wait: one that keeps nothing, and those with state of their own and averages in flight."""

# Everything that a step may depend on: batch norm's buffers, dropout's random numbers, momentum, a schedule.
TASK = """
import torch
from torch import nn
from gossamer import Task

x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
y = (x.sum(1) > 0).long()

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))

task = Task(name="drop", model=model, train=(x, y), test=(x, y), loss=nn.functional.cross_entropy,
            defaults={"lr": 0.05, "batch": 8})
"""
RUN = ("train", "--task", "drop.py", "--workers", "3", "--steps", "12", "--schedule", "cosine", "--out", "run")


@pytest.fixture
def task(tmp_path):
    (tmp_path / "drop.py").write_text(TASK)
    return tmp_path


def model(folder):
    return load_file(folder / "model.safetensors")


def complete(folder):
    return sorted(int(path.parent.name) for path in (folder / "checkpoints").glob("*/complete.json"))


@pytest.mark.parametrize("method", LOCKSTEP)
def test_methods_that_wait_go_on_as_if_nothing_had_happened(gossamer, task, method):
    whole = gossamer(*RUN, "--method", method, "--checkpoint-every", "5", "--json").document["results"][0]
    assert complete(task / "run") == [15, 30]
    expected = model(task / "run")
    again = gossamer("train", "--resume", "run/checkpoints/15", "--json").document["results"][0]
    ended = model(task / "run")
    for name, tensor in expected.items():
        assert torch.equal(ended[name], tensor), name
    assert again["worker_steps"] == whole["worker_steps"] == {"mean": 12, "min": 12, "max": 12}
    assert again["loss"] == whole["loss"]
    assert [report["train_loss"] for report in again["worker_status"]] == [
        pytest.approx(report["train_loss"], rel=1e-12) for report in whole["worker_status"]
    ]
    # The second checkpoint was made again, as often as before.
    assert complete(task / "run") == [15, 30]


def test_methods_that_do_not_wait_go_on_to_the_same_number_of_steps(gossamer, task):
    job_spec = ("--method", "a2cid2", "--compute", "15ms", "--checkpoint-every", "40")
    gossamer(*RUN[:6], "120", *RUN[7:], *job_spec)
    first = complete(task / "run")
    assert first
    assert set(first) <= {120, 240, 360}
    kept = find_checkpoint(task / "run")
    assert first[-1] <= sum(kept.steps) < 360
    before = read_recording(task / "run", [])
    (result,) = gossamer("train", "--resume", "run", "--json").document["results"]
    assert result["total_steps"] == 360
    # The history goes on where the checkpoint is.
    times = [point["time"] for point in result["history"]]
    assert times == sorted(times)
    steps = [point["total_steps"] for point in result["history"]]
    assert steps == sorted(steps)
    assert steps[0] < 120
    assert [json.loads(line) for line in (task / "run" / "metrics.jsonl").read_text().splitlines()] == result["history"]
    # So does the time in what was recorded: what came after does not lie on what was before.
    after = read_recording(task / "run", [])
    assert sum(after["steps"]) > sum(before["steps"])
    assert after["until"] > before["until"] + 0.015 * (360 - sum(kept.steps)) / 3
    assert gossamer("train", "--resume", "run", "--steps", "160").code == 0
    last = read_recording(task / "run", [])
    assert last["until"] > after["until"]
    for rank in range(3):
        assert sum(last["time"][kind][rank] for kind in ("compute", "step", "wait", "dead")) < 1.05 * last["until"]


def test_other_workers_start_from_the_average_of_those_that_were(gossamer, task):
    gossamer(*RUN, "--method", "localsgd", "--period", "5", "--checkpoint-every", "6")
    states = [read_state(task / "run" / "checkpoints" / "36" / f"{rank}.safetensors")["model"] for rank in range(3)]
    ran = gossamer("train", "--resume", "run", "--workers", "2", "--steps", "18", "--lr", "0", "--json")
    (result,) = ran.document["results"]
    assert result["worker_steps"] == {"mean": 18, "min": 18, "max": 18}
    # Two workers have made 36 steps too by now. Their checkpoint comes after that of the three, and is its own.
    assert complete(task / "run") == [36, 48]
    newest = find_checkpoint(task / "run")
    assert (newest.ranks, newest.steps) == ([0, 1], [18, 18])
    assert newest.named_from(Layout(workers=2)) == 12
    assert newest.named_from(Layout(workers=4)) == 0
    ended = model(task / "run")
    assert not torch.equal(states[0]["0.weight"], states[1]["0.weight"])
    for name in ("0.weight", "0.bias", "4.weight"):
        mean = torch.stack([state[name] for state in states]).mean(0)
        torch.testing.assert_close(ended[name], mean, rtol=1e-6, atol=1e-7)


def test_the_last_two_are_kept(gossamer, task):
    gossamer(*RUN, "--method", "allreduce", "--checkpoint-every", "2")
    assert complete(task / "run") == [30, 36]
    assert sorted(path.name for path in (task / "run" / "checkpoints").iterdir()) == ["30", "36"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with two checkpoints."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "drop.py").write_text(TASK)
    with contextlib.chdir(folder):
        assert main([*RUN, "--method", "allreduce", "--checkpoint-every", "5"]) == 0
    return folder


@pytest.fixture
def kept(trained, task):
    """A run with two checkpoints, in this test's own folder."""
    shutil.copytree(trained / "run", task / "run")
    return task / "run" / "checkpoints"


def test_a_checkpoint_that_cannot_be_used_is_one_line_that_names_the_one_before(gossamer, kept):
    newest = kept / "30" / "1.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-100])
    gossamer("train", "--resume", "run").refused("30", "1.safetensors is truncated", "--resume run/checkpoints/15")
    newest.write_bytes(b"not at all")
    gossamer("train", "--resume", "run").refused("1.safetensors is truncated, or no safetensors file")
    shutil.copy(kept.parent / "model.safetensors", newest)
    gossamer("train", "--resume", "run").refused("1.safetensors was not written by this version")
    newest.unlink()
    gossamer("train", "--resume", "run").refused("1.safetensors is missing")
    newest.write_bytes(whole)
    (kept / "30" / "complete.json").write_text("{}")
    gossamer("train", "--resume", "run").refused("complete.json is not what gossamer train writes")
    # One that was being written when the run was killed does not count.
    (kept / "30" / "complete.json").unlink()
    assert gossamer("train", "--resume", "run").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--resume", "nowhere"), ("nowhere is not there",)),
        (("--resume", "."), ("holds several runs", "run")),
        (("--resume", "drop.py"), ("holds no complete checkpoint",)),
        (("--resume", "run", "--method", "overlap"), ("--method is overlap", "allreduce")),
        (("--resume", "run", "--seed", "1"), ("--seed is 1",)),
        (("--resume", "run", "--out", "other"), ("leave out --out",)),
        (("--resume", "run", "--steps", "10"), ("is already at step 10", "--steps is 10")),
        (("--checkpoint-every", "5"), ("--out",)),
        (("--checkpoint-every", "often", "--out", "x"), ("--checkpoint-every is 'often'",)),
    ],
)
def test_what_cannot_be_resumed_is_one_line(gossamer, kept, arguments, words):
    before = sorted(kept.parent.rglob("*"))
    gossamer("train", *arguments).refused(*words)
    assert sorted(kept.parent.rglob("*")) == before


def train_on_a_small_disk(command, folder, largest_file, *options):
    """Train a model of 80 kB; no file may have more than ``largest_file`` bytes."""
    program, environment = command
    return subprocess.run(
        [
            *(*program, "train", "--task", "quadratic", "--dim", "20000", "--workers", "2"),
            *("--method", "allreduce", "--out", "run", *options),
        ],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file)),
    )


def test_a_disk_that_is_full_does_not_end_the_training(command, task):
    # A checkpoint is several times as large as the model, which still fits.
    ran = train_on_a_small_disk(command, task, 120_000, "--steps", "30", "--checkpoint-every", "10")
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"allreduce: worker [01]: no checkpoint after 20 steps: .*; training goes on", ran.stderr)
    assert json.loads((task / "run" / "summary.json").read_text())["steps"] == 30
    assert complete(task / "run") == []
    assert not list((task / "run").rglob("*.part"))


def test_a_model_that_does_not_fit_in_the_end_is_an_error(command, task):
    ran = train_on_a_small_disk(command, task, 60_000, "--steps", "10")
    assert ran.returncode == 2, ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("gossamer: ")]
    assert line.startswith("gossamer: --out run cannot be written to: ")
    assert "Traceback" not in ran.stderr
    assert not list((task / "run").rglob("model*"))


def test_a_state_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    path = tmp_path / "0.safetensors"
    state = {"a": torch.arange(3), "b": [1, (2.5, None)], "c": {0: torch.ones(2, 2).t(), "d": 2**70}}
    write_state(path, state, 7)
    before = path.read_bytes()

    def full(tensors, place, metadata):
        place.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gossamer.train.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_state(path, state, 8)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    read = read_state(path)
    assert torch.equal(read["a"], state["a"])
    assert torch.equal(read["c"][0], state["c"][0])
    assert (read["b"], read["c"]["d"]) == (state["b"], 2**70)
