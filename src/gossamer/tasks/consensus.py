"""Consensus: every worker starts from its own random vector, and workers only average.

Without data and gradients, a run shows how fast a method and a topology mix.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.tasks.task import Task, TaskConfig


class Vector(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w.expand(len(inputs), -1)


def no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return zero: consensus has no loss, but the interface requires one."""
    return 0.0 * outputs.sum()


def draw_start(rank: int, rng: np.random.Generator, *, dim: int) -> np.ndarray:
    """Draw the start of worker ``rank``: N(0, 1) in each coordinate."""
    return rng.standard_normal(dim)


def consensus(workers: int, seed: int, config: TaskConfig) -> Task:
    # One empty sample per worker, because a task must have data.
    nothing = (torch.zeros(workers, 1), torch.zeros(workers))
    return Task(
        name="consensus",
        model=partial(Vector, config.dim),
        train=nothing,
        test=nothing,
        loss=no_loss,
        own_data=True,
        gradients=False,
        start=partial(draw_start, dim=config.dim),
        # lr scales gradients, of which there are none.
        defaults={"optimizer": "sgd", "lr": {"sgd": 0.0}, "momentum": 0.0, "batch": 1, "steps": 200},
    )
