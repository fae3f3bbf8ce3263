"""Shapes of learning-rate schedules: functions from the share of the training that is done to a factor."""

from __future__ import annotations

import math
from collections.abc import Callable

Shape = Callable[[float], float]


def cosine(progress: float) -> float:
    """Half a cosine, from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def linear(progress: float) -> float:
    """A straight line from 1 to 0."""
    return 1 - progress


def step(progress: float) -> float:
    """1, a tenth from the middle on, a hundredth in the last quarter."""
    return 0.1 ** (int(progress >= 0.5) + int(progress >= 0.75))


def constant(progress: float) -> float:
    """1 throughout."""
    return 1.0


SHAPES: dict[str, Shape] = {"constant": constant, "cosine": cosine, "linear": linear, "step": step}
