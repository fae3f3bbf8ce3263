"""Loops whose gradients travel in buckets during the backward pass, and as a whole at the optimizer's step."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from loop_kinds import LOOPS, Loop, Training, accumulated
from torch import Tensor, nn

import gossamer
from gossamer.process.runtime import early_gradient

STEPS = 8
SMALL_BYTES = 100
"""Buckets of this size hold one parameter, or two small ones."""

WHOLE_BYTES = 1 << 30


class Unused(nn.Module):
    """A model with a part that no gradient reaches, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.unused, self.decode = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.encode(x)))


def changed_unseen(training: Training) -> None:
    """Gradients are scaled in a way that torch does not count as a change."""
    training.optimizer.zero_grad()
    training.loss().backward()
    for parameter in training.model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)
    training.optimizer.step()


def replaced(training: Training) -> None:
    training.optimizer.zero_grad()
    training.loss().backward()
    for parameter in training.model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.sign()
    training.optimizer.step()


def some_accumulated(training: Training) -> None:
    """The last step of what a loader gives accumulates less."""
    training.turn = getattr(training, "turn", 0) + 1  # type: ignore[attr-defined]
    (training.plain_step if training.turn % 3 else lambda: accumulated(training))()  # type: ignore[attr-defined]


def thrown_away(training: Training) -> None:
    """A gradient is computed and not used."""
    training.loss().backward()
    training.plain_step()


def by_hook(training: Training) -> None:
    """A hook of the user's changes each gradient when it is there, after ours."""

    def shrink(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.9)

    hooks = [parameter.register_post_accumulate_grad_hook(shrink) for parameter in training.model.parameters()]
    training.plain_step()
    for hook in hooks:
        hook.remove()


def mixed_dtypes() -> nn.Module:
    """The gradients of the first layer are rounded in the vector that travels."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Cast(), nn.Linear(8, 6, dtype=torch.float64), Cast(torch.float32))


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


EARLY = {
    "plain",
    "param groups",
    "schedule",
    "closure",
    "gradients set to zero",
    "autocast",
    "compiled",
    "frozen parameters",
    "tied weights",
    "channels last",
    "batch norm",
    "unused",
    "mixed dtypes",
}
"""Loops in which every gradient that was sent early holds."""

KINDS: dict[str, Loop] = {
    **{name: loop for name, loop in LOOPS.items() if not name.startswith("compiled ahead")},
    "unused": Loop(model=Unused),
    "mixed dtypes": Loop(model=mixed_dtypes),
    "changed unseen": Loop(step=changed_unseen),
    "replaced": Loop(step=replaced),
    "some accumulated": Loop(step=some_accumulated),
    "thrown away": Loop(step=thrown_away),
    "by hook": Loop(step=by_hook),
}


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Train with each loop, with buckets and as a whole."""
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    count_early = watch_buckets()
    for name in order["kinds"]:
        loop, weights = KINDS[name], {}
        sent: list[int] = []
        for bucket_bytes in (SMALL_BYTES, WHOLE_BYTES):
            early_gradient.BUCKET_BYTES = bucket_bytes
            training = Training(loop, data_seed=rank)
            swarm = gossamer.join(training.model, training.optimizer, method="allreduce")
            for _ in range(STEPS):
                loop.step(training)
            weights[bucket_bytes] = training.weights()
            metrics = swarm.metrics()
            swarm.finish()
            wait_for_all(Path(order["folder"]), f"{name} {bucket_bytes}", rank, int(environment["WORLD_SIZE"]))
            sent = sent or count_early()
        early, whole = torch.tensor(weights[SMALL_BYTES]), torch.tensor(weights[WHOLE_BYTES])
        torch.testing.assert_close(early, whole, rtol=1e-4, atol=1e-6)
        out.send(
            {
                "at": name,
                "steps": metrics.steps,
                "repeated": metrics.repeated,
                "sent": sent,
                "same": torch.equal(early, whole),
                "digest": hashlib.sha1(early.numpy().tobytes()).hexdigest(),
            }
        )
    out.send({"at": "end"})


def wait_for_all(folder: Path, what: str, rank: int, count: int) -> None:
    """Return once all workers have come here: their next job uses the same port."""
    (folder / f"{what} {rank}").touch()
    while not all((folder / f"{what} {other}").exists() for other in range(count)):
        time.sleep(0.005)


def watch_buckets() -> Callable[[], list[int]]:
    """Return what tells how many buckets were under way at each step so far."""
    seen: list[int] = []
    before_step = early_gradient.EarlyGradient.before_step

    def watched(early: early_gradient.EarlyGradient) -> None:
        seen.append(len(early._sent))
        before_step(early)

    early_gradient.EarlyGradient.before_step = watched  # type: ignore[method-assign]

    def count() -> list[int]:
        told = list(seen)
        seen.clear()
        return told

    return count


def chain_for(rank: int) -> Training:
    """A model of three layers, and the data of one worker."""
    chain = Loop(model=lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6)))
    return Training(chain, data_seed=rank)


def train_until_killed(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """One worker kills itself in the middle of a backward pass, once a bucket of it has been averaged."""
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    early_gradient.BUCKET_BYTES = SMALL_BYTES
    training = chain_for(rank)
    victim, dies_at = order["dies"]
    swarm = gossamer.join(training.model, training.optimizer, method="allreduce")
    early = swarm._runtime.effects.early
    assert early is not None
    step = 0

    def die(gradient: Tensor) -> None:
        if rank == victim and step == dies_at:
            # The gradient of the middle layer is being computed: that of the last has been averaged.
            early._sent[0].result()
            os.kill(os.getpid(), signal.SIGKILL)

    training.model[2].weight.register_hook(die)  # type: ignore[union-attr, operator]
    for step in range(STEPS):  # noqa: B007
        training.plain_step()
    metrics, weights = swarm.metrics(), training.weights()
    swarm.finish()
    out.send(
        {
            "at": "finished",
            "weights": weights,
            "steps": metrics.steps,
            "repeated": metrics.repeated,
            "dropped": metrics.dropped,
        }
    )
