"""When a learning curve reaches a target: seen, or extrapolated by a power law with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NEWEST_SHARE = 0.6
"""Of the logarithm of the steps seen so far: the part of the curve that is extrapolated. Early learning is faster."""

MIN_POINTS = 5
MIN_EXPONENT = 0.02
"""A curve that falls more slowly than this power of the steps is flat."""

MAX_FACTOR = 30.0
"""Nothing is said about more than this many times the steps that were seen."""

QUANTILE = 1.64
"""Standard deviations on either side of nine runs in ten."""


@dataclass(frozen=True)
class Reached:
    """The steps to a target."""

    steps: float
    low: float
    high: float
    extrapolated: bool


def when_reached(steps: Sequence[float], errors: Sequence[float], target: float) -> Reached | None:
    """Return when the errors fall to the target; None if they do not, as far as can be said.

    Args:
        steps: at which the errors were measured, ascending.
        errors: that fall while a model learns.
    """
    for index, error in enumerate(errors):
        if error <= target:
            at = _crossing(steps, errors, target, index)
            return Reached(at, at, at, extrapolated=False)
    known = [(math.log(step), math.log(error)) for step, error in zip(steps, errors, strict=True) if step > 0 < error]
    if len(known) < MIN_POINTS:
        return None
    first = known[-1][0] - NEWEST_SHARE * (known[-1][0] - known[0][0])
    newest = [pair for pair in known if pair[0] >= first]
    if len(newest) < MIN_POINTS:
        newest = known[-MIN_POINTS:]
    log_steps, log_errors = np.array(newest).T
    slope, offset = np.polyfit(log_steps, log_errors, 1)
    if slope > -MIN_EXPONENT:
        return None
    log_reached = (math.log(target) - offset) / slope
    # The error of the fit at the target: of one measurement, of the mean and of the slope.
    deviation = float(np.sqrt(np.sum((log_errors - slope * log_steps - offset) ** 2) / (len(newest) - 2)))
    centred = log_steps - log_steps.mean()
    leverage = 1 / len(newest) + (log_reached - log_steps.mean()) ** 2 / float(centred @ centred)
    spread = QUANTILE * deviation * math.sqrt(1 + leverage) / -slope
    reached = max(math.exp(log_reached), steps[-1])
    if reached > MAX_FACTOR * steps[-1]:
        return None
    low, high = max(steps[-1], reached * math.exp(-spread)), reached * math.exp(min(spread, 20.0))
    return Reached(reached, low, high, extrapolated=True)


def _crossing(steps: Sequence[float], errors: Sequence[float], target: float, index: int) -> float:
    """Return where the line between the last error above the target and the first one at or below it crosses it."""
    if index == 0 or errors[index - 1] <= errors[index]:
        return steps[index]
    share = (errors[index - 1] - target) / (errors[index - 1] - errors[index])
    return steps[index - 1] + share * (steps[index] - steps[index - 1])
