"""The plain-PyTorch example trains, resumes and ends with one model, under torchrun and alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gossamer.report.runs import read_run

EXAMPLE = Path(__file__).parents[1] / "examples" / "train.py"


def run(*arguments, workers):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"] if workers > 1 else []
    program = [sys.executable, *launcher, str(EXAMPLE), *map(str, arguments)]
    finished = subprocess.run(program, capture_output=True, text=True, timeout=130)
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
