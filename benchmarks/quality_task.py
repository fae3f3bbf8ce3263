"""Digits with a network of 301,066 parameters: large enough for slow links to matter, small enough for two cores."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from gossamer.tasks import Task, TaskConfig
from gossamer.tasks.digits import digits


def network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def task(workers: int, seed: int) -> Task:
    return replace(digits(workers, seed, TaskConfig()), name="digits-wide", model=network)
