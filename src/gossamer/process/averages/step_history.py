"""When each worker did its steps, and how much its model counts in an average because of that.

Workers may have different numbers of mini-batches. One that has stopped keeps the weights and the buffers of its last
step, unless exchanges still reach its weights. How many steps a worker is *behind* decides how much it counts: fully up
to an eighth of the run, not at all from a quarter on, linearly in between. In short runs: up to 5 steps, from 10 on.

- Workers in lockstep count their steps together: one is behind by the steps that it did not do.
- Otherwise weights are behind by the steps that the fastest worker did since this one was last *in touch*: did a step,
  took part in an average, or took over a state. A pairwise exchange goes half-way, so it halves the time since then. A
  worker that has done as many steps as any other is not behind, however early.
- Otherwise buffers, such as batch norm's statistics, count by the worker's steps in the last quarter, since they do not
  travel: fully if it did at least half as many as the fastest one, else in proportion; not at all if it did none.
- The weights of a worker that was never in touch are from before the training. They do not count.
- Buffers that are no floating-point numbers cannot be averaged. They are those of the worker whose buffers count most,
  and of these the one with the most steps.

Workers that do the same number of steps at about the same pace count the same: the average is the plain mean.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_SAMPLES = 64
"""Steps whose time is remembered, evenly spaced over the run."""

LAST_SHARE, MIN_WINDOW = 0.25, 10
"""The last part of the run, as a share of the steps of the worker with the most, and its least length in steps."""

RESOLUTION = 64
"""Weights are multiples of 1/64, which a sum in any floating-point format keeps."""


class StepHistory:
    """When one worker did its steps, as far as the others need to know."""

    ROW_LENGTH = 5 + MAX_SAMPLES

    def __init__(self) -> None:
        self.steps = 0
        self.busy_s = 0.0
        """Time of all steps but the first, without waits for other workers."""
        self._spacing = 1
        self._times: list[float] = []
        """Of the steps whose number is a multiple of the spacing."""
        self._joined_at = time.monotonic()
        self._last_step_at = self._last_touch_at = float("-inf")
        self._last_idle_s = 0.0

    def add_step(self, now: float, idle_s: float) -> None:
        """Count a step that has just ended. ``idle_s``: for how long this worker has waited for others so far."""
        if self.steps:
            self.busy_s += max(0.0, now - self._last_step_at - (idle_s - self._last_idle_s))
        self.steps += 1
        self._last_step_at, self._last_idle_s = now, idle_s
        self.touch(now)
        if self.steps % self._spacing == 0:
            self._times.append(now)
        if len(self._times) > MAX_SAMPLES:
            # The samples left are those of the multiples of twice the spacing.
            self._times = self._times[1::2]
            self._spacing *= 2

    def touch(self, now: float) -> None:
        """This worker's weights are as new as those of the others."""
        self._last_touch_at = now

    def touch_half(self, now: float) -> None:
        """This worker has moved half-way to the weights of another."""
        self._last_touch_at = (max(self._last_touch_at, self._joined_at) + now) / 2

    def row(self, now: float, total_steps: int) -> Tensor:
        """Return the history as one vector of ``ROW_LENGTH`` numbers; times as seconds before ``now``.

        ``total_steps``: also those before it was resumed or, in lockstep, before it joined.
        """
        row = torch.full((self.ROW_LENGTH,), float("inf"), dtype=torch.float64)
        row[:3] = torch.tensor([total_steps, self.steps, self._spacing])
        ages = [self._last_touch_at, self._last_step_at, *self._times]
        row[3 : 3 + len(ages)] = now - torch.tensor(ages, dtype=torch.float64)
        return row


@dataclass(frozen=True)
class Contributions:
    """How much each of several workers counts in their average."""

    weights: list[float]
    """For the weights: from 0 to 1."""
    buffers: list[float]
    """For the buffers: from 0 to 1."""
    most_advanced: int
    """Whose buffers are taken where they cannot be averaged."""


def contributions(rows: list[Tensor], lockstep: bool) -> Contributions:
    """Return how much the workers with these histories count."""
    curves = [_Curve(row) for row in rows]
    most = max(curve.total_steps for curve in curves)
    if most == 0 or all(curve.touched_at == float("-inf") for curve in curves):
        return Contributions([1.0] * len(rows), [1.0] * len(rows), 0)
    window = max(LAST_SHARE * most, MIN_WINDOW)

    def behind(curve: _Curve) -> float:
        if curve.touched_at == float("-inf"):
            return window
        fewer = most - curve.total_steps
        return fewer if lockstep else min(fewer, max(other.since(curve.touched_at) for other in curves))

    weights = [_rounded(2 * (1 - behind(curve) / window)) for curve in curves]
    window_began = max(curve.time_of(curve.steps - window) for curve in curves)
    recent = [curve.since(window_began) for curve in curves]
    by_steps = [_rounded(2 * each / max(*recent, 1.0)) for each in recent]
    buffers = by_steps if any(recent) and not lockstep else weights
    most_advanced = max(range(len(rows)), key=lambda index: (buffers[index], curves[index].total_steps, -index))
    return Contributions(weights, buffers, most_advanced)


class _Curve:
    """The number of steps of one worker since it joined, as a function of time; the present is 0."""

    def __init__(self, row: Tensor) -> None:
        self.total_steps, self.steps, spacing = map(int, row[:3])
        self.touched_at = -float(row[3])
        ages = row[5:][torch.isfinite(row[5:])].tolist()
        points = [(-age, float(spacing * number)) for number, age in enumerate(ages, 1)]
        if self.steps:
            points.append((-float(row[4]), float(self.steps)))
        self._times = np.array([at for at, _ in points])
        self._counts = np.array([count for _, count in points])

    def since(self, at: float) -> float:
        """Return the number of steps after the time ``at``."""
        if not self.steps:
            return 0.0
        return self.steps - float(np.interp(at, self._times, self._counts, left=0.0))

    def time_of(self, count: float) -> float:
        """Return when the worker had done so many steps; −∞ if it began with them."""
        if not self.steps or count <= 0:
            return float("-inf")
        return float(np.interp(count, self._counts, self._times))


def _rounded(share: float) -> float:
    return round(RESOLUTION * min(1.0, max(0.0, share))) / RESOLUTION
