"""The examples train, resume and end with one model: the plain-PyTorch one also alone, the LLM in replicas."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gossamer.report.runs import read_run

EXAMPLE = Path(__file__).parents[1] / "examples" / "train.py"
LLM = EXAMPLE.with_name("llm.py")


def run(*arguments, workers, example=EXAMPLE):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"] if workers > 1 else []
    program = [sys.executable, *launcher, str(example), *map(str, arguments)]
    finished = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def accuracies(output):
    """The accuracy of each worker's model after ``finish``, by rank."""
    found = dict(re.findall(r"worker (\d): accuracy ([0-9.]+)", output))
    return [found[rank] for rank in sorted(found)]


def test_two_workers_train_resume_and_hold_one_model(tmp_path):
    output = run("--epochs", 2, "--out", tmp_path, workers=2)
    assert output.count("accuracy of the averaged model") == 2
    first, second = accuracies(output)
    assert first == second
    assert float(first) > 0.9
    names = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoint-0.pt", "checkpoint-1.pt", "model.pt", "run.json", "summary.json", "model.safetensors"} <= names

    output = run("--epochs", 3, "--out", tmp_path, "--resume", workers=2)
    assert "epoch 2:" in output
    assert "epoch 1:" not in output
    first, second = accuracies(output)
    assert first == second
    assert float(first) > 0.9
    run_folder = read_run(tmp_path)
    assert run_folder.notes == []
    assert [point["total_steps"] for point in run_folder.points][-1] == run_folder.final["total_steps"] == 3 * 2 * 22
    assert run_folder.final["accuracy"] > 0.9
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.isfinite(tensor).all() for tensor in model.values())


@pytest.mark.parametrize("method", ["allreduce", "overlap"])
def test_one_worker_runs_the_same_script(method):
    (accuracy,) = accuracies(run("--epochs", 1, "--method", method, workers=1))
    assert float(accuracy) > 0.9


def test_the_llm_trains_in_replicas_and_resumes_where_it_was(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}.\n" for number in range(400)))
    small = ("--layers", 1, "--width", 32, "--heads", 2, "--context", 16, "--period", 4)

    def held_out(steps, *options):
        output = run(text, *small, "--steps", steps, *options, workers=2, example=LLM)
        losses = re.findall(r"rank \d: loss on held-out text ([0-9.]+)", output)
        assert len(losses) == 2
        assert losses[0] == losses[1]
        return losses[0]

    # The average that is started after step 8 arrives after step 9: the checkpoint has it in flight.
    first = held_out(8, "--checkpoint", tmp_path / "checkpoint")
    assert held_out(12, "--checkpoint", tmp_path / "checkpoint") == held_out(12)
    assert float(first) < 5.5  # as good as knowing nothing
