"""The task of ``benchmarks/planner_replicas.py``: four blocks, half a million parameters, next to no arithmetic."""

import torch
from torch import nn

from gossamer.tasks import Task

WIDTH, BLOCKS = 352, 4
INPUTS = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))

task = Task(
    name="blocks",
    model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))),
    train=(INPUTS, INPUTS),
    test=(INPUTS[:1], INPUTS[:1]),
    loss=nn.functional.mse_loss,
)
