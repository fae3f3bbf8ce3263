"""The timing of one worker: how long its gradients take, how long its steps took, when it evaluates its model."""

from __future__ import annotations

import math
import threading
import time
from collections import deque

import numpy as np

from gossamer.hardware import ComputeTimes

EVALUATION_SHARE = 0.01
"""By default the evaluations of all workers together take this share of one worker's time."""

NUM_ESTIMATES = 5
"""Gradients that are timed before the first evaluation."""


class Pace:
    """Delays a worker's gradients to a given time, or slows a straggler down.

    It waits instead of computing, so it takes no time from workers on the same cores.
    """

    def __init__(
        self, compute_times: ComputeTimes, fixed: bool, rank: int, rng: np.random.Generator, stop: threading.Event
    ) -> None:
        """``fixed``: gradients take the given times, else what they take, times the straggler's factor."""
        self.compute_times, self.fixed, self.rank, self.rng, self.stop = compute_times, fixed, rank, rng, stop
        self.factor = float(compute_times.factor[rank])

    @property
    def natural(self) -> bool:
        """Whether gradients take what they take, without any delay."""
        return not self.fixed and self.factor == 1.0

    def draw(self) -> float:
        """Return how long the next gradient takes, if that is given."""
        return self.compute_times.draw(self.rank, self.rng)

    def delay(self, began: float) -> None:
        """Wait until a gradient that began then has taken as long as it should."""
        if self.natural:
            return
        elapsed = time.monotonic() - began
        wanted = self.draw() if self.fixed else self.factor * elapsed
        if wanted > elapsed:
            self.stop.wait(wanted - elapsed)


class StepMeter:
    """Measures the time from one step to the next, once connections are made and everything runs."""

    MAX_STEPS = 1000

    def __init__(self, period: int = 1) -> None:
        """``period``: the method's pattern repeats after this many steps; only whole periods are averaged."""
        self.period = period
        self._ends: deque[float] = deque(maxlen=self.MAX_STEPS)

    def add(self, now: float) -> None:
        self._ends.append(now)

    def mean_s(self) -> float:
        """Return the mean time of a step; 0 before there are two."""
        ends = list(self._ends)
        count = len(ends) - 1
        if len(ends) < self.MAX_STEPS:
            count -= len(ends) // 4
        if count > self.period:
            count -= count % self.period
        return (ends[-1] - ends[-1 - count]) / count if count > 0 else 0.0


class EvalSchedule:
    """When a worker evaluates its own model on the test set: every so many steps, or as often as is cheap.

    Workers in lockstep wait for an evaluation of each, so it is the sum over all workers that is kept small.
    """

    def __init__(self, every: int, workers: int) -> None:
        self._every, self._share = every, EVALUATION_SHARE / workers
        self._since, self._cost_s = 0.0, math.inf
        self._num_estimates = 0

    @property
    def estimating(self) -> bool:
        """Whether the cost of an evaluation is still to be estimated."""
        return not self._every and self._num_estimates < NUM_ESTIMATES

    def estimate(self, now: float, cost_s: float) -> None:
        """Add an estimate of the cost. The lowest counts: a first gradient takes long for many reasons."""
        self._num_estimates += 1
        self._since = now if self._num_estimates == 1 else self._since
        self._cost_s = min(cost_s, self._cost_s)

    def evaluated(self, now: float, cost_s: float) -> None:
        self._since, self._cost_s, self._num_estimates = now, cost_s, NUM_ESTIMATES

    def due(self, now: float, step: int) -> bool:
        if self._every:
            return step % self._every == 0
        return now >= self._since + self._cost_s / self._share
