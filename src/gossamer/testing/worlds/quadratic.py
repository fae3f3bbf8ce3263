"""What the checks train: the quadratic in float64, and an optimizer that keeps account of what it adds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.seeds import stream
from gossamer.tasks import Task

SIZES = (1, 1, 2, 2)
"""Lengths of the model's tensors."""

DIM = sum(SIZES)


class Distance(nn.Module):
    """w − b in float64, so that invariants can be checked to round-off."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.zeros(size, dtype=torch.float64) for size in SIZES)

    def forward(self, b: Tensor) -> Tensor:
        return torch.cat(list(self.w)) - b


def half_square(differences: Tensor, targets: Tensor) -> Tensor:
    """Return ½‖·‖², mean over the batch."""
    return 0.5 * differences.square().sum(-1).mean()


def draw_start(rank: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(DIM)


def quadratic(workers: int, seed: int = 0) -> Task:
    """Worker i minimises ½‖w − b_i‖²."""
    b = torch.from_numpy(stream(seed, "testing").standard_normal((workers, DIM)))
    return Task(
        name="quadratic",
        model=Distance,
        train=(b, torch.zeros(workers)),
        test=(b, torch.zeros(workers)),
        loss=half_square,
        own_data=True,
        defaults={"batch": 1},
    )


def disagreement(workers: int) -> Task:
    """No gradients: workers start apart and only average."""
    nothing = (torch.zeros(workers, 1), torch.zeros(workers))
    return Task(
        name="disagreement",
        model=Distance,
        train=nothing,
        test=nothing,
        loss=half_square,
        own_data=True,
        gradients=False,
        start=draw_start,
        defaults={"batch": 1},
    )


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def recording(make: MakeOptimizer, added: Tensor) -> MakeOptimizer:
    """Return ``make`` whose optimizers add to ``added`` all that they add to their parameters."""

    def make_recording(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        kind: Any = type(optimizer)

        class Recording(kind):
            def step(self, closure: Any = None) -> None:
                before = flat(self)
                super().step(closure)
                added.add_(flat(self) - before)

        # Not by a hook: the virtual cluster takes the steps of optimizers that it knows without calling them.
        optimizer.__class__ = Recording
        return optimizer

    return make_recording


def flat(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return a copy of all parameters of an optimizer as one vector."""
    return torch.cat([p.detach().flatten() for group in optimizer.param_groups for p in group["params"]])
