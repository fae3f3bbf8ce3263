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
    """The steps to a target, and an interval that holds them in nine runs in ten with the same seed.

    One curve does not tell how much other seeds differ.
    """

    steps: float
    low: float
    high: float
    extrapolated: bool


@dataclass(frozen=True)
class _PowerLaw:
    """The line through the newest part of a curve, both axes logarithmic."""

    slope: float
    offset: float
    deviation: float
    """Standard deviation of one measurement from the line."""
    log_steps: np.ndarray
    """Of the measurements that were fitted."""

    def spread(self, leverage: float = 0.0) -> float:
        """Return half the interval, in the logarithm of the steps; ``leverage``: of the error of the line itself."""
        return QUANTILE * self.deviation * math.sqrt(1 + leverage) / -self.slope


def when_reached(steps: Sequence[float], errors: Sequence[float], target: float) -> Reached | None:
    """Return when the errors fall to the target; None if they do not, as far as can be said.

    Args:
        steps: at which the errors were measured, ascending.
        errors: that fall while a model learns.
    """
    for index, error in enumerate(errors):
        if error <= target:
            return _seen(steps[: index + 1], errors[: index + 1], target)
    law = _fit(steps, errors)
    if law is None:
        return None
    log_reached = (math.log(target) - law.offset) / law.slope
    # The error of the fit at the target: of one measurement, of the mean and of the slope.
    centred = law.log_steps - law.log_steps.mean()
    leverage = 1 / len(centred) + (log_reached - law.log_steps.mean()) ** 2 / float(centred @ centred)
    spread = law.spread(leverage)
    reached = max(math.exp(log_reached), steps[-1])
    if reached > MAX_FACTOR * steps[-1]:
        return None
    low, high = max(steps[-1], reached * math.exp(-spread)), reached * math.exp(min(spread, 20.0))
    return Reached(reached, low, high, extrapolated=True)


def _fit(steps: Sequence[float], errors: Sequence[float]) -> _PowerLaw | None:
    """Fit the newest part of a curve. None if it has too few points, or does not fall."""
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
    deviation = float(np.sqrt(np.sum((log_errors - slope * log_steps - offset) ** 2) / (len(newest) - 2)))
    return _PowerLaw(float(slope), float(offset), deviation, log_steps)


def _seen(steps: Sequence[float], errors: Sequence[float], target: float) -> Reached:
    """Return where a curve that ends at the target reached it.

    It was somewhere between its last two measurements, and each of them is as noisy as the curve shows.
    """
    at = _crossing(steps, errors, target, len(steps) - 1)
    low, high = steps[-2] if len(steps) > 1 else 0.0, steps[-1]
    law = _fit(steps, errors)
    if law is not None:
        spread = min(law.spread(), 20.0)
        low, high = min(low, at * math.exp(-spread)), max(high, at * math.exp(spread))
    return Reached(at, low, high, extrapolated=False)


def _crossing(steps: Sequence[float], errors: Sequence[float], target: float, index: int) -> float:
    """Return where the line between the last error above the target and the first one at or below it crosses it."""
    if index == 0 or errors[index - 1] <= errors[index]:
        return steps[index]
    share = (errors[index - 1] - target) / (errors[index - 1] - errors[index])
    return steps[index - 1] + share * (steps[index] - steps[index - 1])
