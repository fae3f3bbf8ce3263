"""Quadratic: worker i minimises ½‖w − b_i‖², so everything about a run is known in closed form.

The b_i ~ N(0, 1) are drawn from the seed, one per worker, so the workers' data differ as much as possible. The mean
objective is smallest at w = b̄, where it is ½ mean_i ‖b̄ − b_i‖².

With noise σ, each use of b_i is b_i + σξ, ξ ~ N(0, 1): the gradient w − b_i − σξ has additive noise of standard
deviation σ per coordinate.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.seeds import stream
from gossamer.tasks.task import Task, TaskConfig


class Distance(nn.Module):
    """Computes w − b with one parameter vector w."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def forward(self, b: Tensor) -> Tensor:
        return self.w - b


def half_square(differences: Tensor, targets: Tensor) -> Tensor:
    """Return ½‖·‖², mean over the batch. The targets are not used: the sample is the target."""
    return 0.5 * differences.square().sum(-1).mean()


def add_noise(b: Tensor, rng: np.random.Generator, *, noise: float) -> Tensor:
    return b + torch.from_numpy(noise * rng.standard_normal(b.shape)).to(b)


def quadratic(workers: int, seed: int, config: TaskConfig) -> Task:
    b = stream(seed, "quadratic").standard_normal((workers, config.dim))
    samples = (torch.from_numpy(b).float(), torch.zeros(workers))
    return Task(
        name="quadratic",
        model=partial(Distance, config.dim),
        train=samples,
        test=samples,
        loss=half_square,
        augment=partial(add_noise, noise=config.noise) if config.noise > 0 else None,
        own_data=True,
        # A small step, because the plateau due to noise and disagreement scales with it.
        defaults={
            "optimizer": "sgd",
            "lr": {"sgd": 0.01, "adam": 0.01},
            "momentum": 0.0,
            "batch": 1,
            "steps": 1000,
            "weight_decay": 0.0,
        },
    )
