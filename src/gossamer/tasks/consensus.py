"""Consensus: every worker starts from its own random vector, and workers only average.

Without data and gradients, a run shows how fast a method and a topology mix.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from gossamer.tasks.quadratic import Distance, half_square
from gossamer.tasks.task import Task, TaskConfig


def draw_start(rank: int, rng: np.random.Generator, *, dim: int) -> np.ndarray:
    """Draw the start of worker ``rank``: N(0, 1) in each coordinate."""
    return rng.standard_normal(dim)


def consensus(workers: int, seed: int, config: TaskConfig) -> Task:
    # A task must have data and a loss; without gradients neither is used.
    nothing = (torch.zeros(workers, 1), torch.zeros(workers))
    return Task(
        name="consensus",
        model=partial(Distance, config.dim),
        train=nothing,
        test=nothing,
        loss=half_square,
        own_data=True,
        gradients=False,
        start=partial(draw_start, dim=config.dim),
        # lr scales gradients, of which there are none.
        defaults={"optimizer": "sgd", "lr": {"sgd": 0.0}, "momentum": 0.0, "batch": 1, "steps": 200},
    )
