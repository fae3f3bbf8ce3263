"""A run of replicas is resumed with other numbers of replicas and ranks: weights and Adam's moments are those saved."""

import pytest
import torch
from safetensors.torch import load_file

from gossamer.train.checkpoint import find_checkpoint

TASK = """
import torch
from torch import nn
from gossamer import Task

def task(workers, seed):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=draw)
    y = x @ torch.randn(6, 4, generator=draw)
    model = lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))
    loss = lambda outputs, targets: {factor} * (outputs - targets).square().mean()
    return Task(name="lines", model=model, train=(x, y), test=(x, y), loss=loss, defaults={{"batch": 4}})
"""
BETAS = {"exp_avg": 0.9, "exp_avg_sq": 0.999}
STEPS = 6


def shape(replicas, ranks):
    inside = ("--inside", "fsdp") if ranks > 1 else ("--inside", "ddp")
    return ("--workers", str(replicas), "--replica-size", str(ranks), *inside)


def moments(run):
    """The mean of the optimizer states in the newest checkpoint of a run, by parameter."""
    checkpoint = find_checkpoint(run)
    each = [checkpoint.state(replica)["optimizer"]["state"] for replica in checkpoint.ranks]
    assert all(states.keys() == {0, 1, 2, 3} for states in each)
    return [
        {name: torch.stack([states[number][name].double() for states in each]).mean(0) for name in ("step", *BETAS)}
        for number in range(4)
    ]


@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (3, 2)), ((2, 2), (1, 3)), ((1, 1), (2, 2))], ids=lambda each: f"{each[0]}x{each[1]}"
)
def test_a_resumed_run_with_other_replicas_starts_from_the_mean(gossamer, tmp_path, before, after):
    (tmp_path / "lines.py").write_text(TASK.format(factor=1))
    common = ("--method", "localsgd", "--period", "4", "--optimizer", "adam")
    run = (*shape(*before), *common, "--task", "lines.py", "--lr", "0.05", "--steps", str(STEPS))
    assert gossamer("train", *run, "--checkpoint-every", str(STEPS), "--out", "run").code == 0
    saved = find_checkpoint(tmp_path / "run")
    assert saved.steps == [STEPS] * before[0]
    assert gossamer("export", saved.path, "--out", "saved.safetensors").code == 0
    adam = moments(tmp_path / "run")

    # One step without gradient and learning rate: Adam's moments decay by their betas, nothing else happens.
    (tmp_path / "lines.py").write_text(TASK.format(factor=0))
    more = (*shape(*after), "--steps", str(STEPS + 1), "--lr", "0", "--checkpoint-every", "1")
    assert gossamer("train", "--resume", "run", *more).code == 0
    resumed = find_checkpoint(tmp_path / "run")
    assert resumed.path != saved.path
    assert resumed.steps == [STEPS + 1] * after[0]
    assert gossamer("export", resumed.path, "--out", "resumed.safetensors").code == 0
    torch.testing.assert_close(load_file("resumed.safetensors"), load_file("saved.safetensors"), rtol=0, atol=1e-7)
    others = resumed.state(after[0] - 1)["optimizer"]["state"]
    for number, (state, now) in enumerate(zip(adam, moments(tmp_path / "run"), strict=True)):
        assert float(now["step"]) == STEPS + 1
        for name, beta in BETAS.items():
            assert state[name].abs().sum() > 0
            torch.testing.assert_close(now[name], beta * state[name], rtol=1e-5, atol=1e-9)
            torch.testing.assert_close(others[number][name].double(), now[name], rtol=1e-5, atol=1e-9)
