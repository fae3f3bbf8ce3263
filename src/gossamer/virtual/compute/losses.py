"""Training losses, as the batches they are computed in come, and the first that is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Diverged(Exception):
    """A worker's loss is not finite any more."""

    def __init__(self, time: float, rank: int, step: int) -> None:
        super().__init__(f"diverged: the loss of worker {rank} was not finite at its step {step}, time {time:g}")
        self.time, self.rank, self.step = time, rank, step


class Losses:
    """The losses since somebody last looked."""

    def __init__(self) -> None:
        self.times: list[Any] = []
        """For every gradient: the worker, the number of its mini-batch, the time. Flat: fewer objects for Python."""
        self._batches: list[tuple[list[int], list[int], Tensor]] = []

    def add(self, ranks: list[int], steps: list[int], losses: Tensor) -> None:
        """What the workers ``ranks`` lost at their mini-batches ``steps``."""
        self._batches.append((ranks, steps, losses))

    def take(self) -> float | None:
        """Their mean, once; raises ``Diverged`` if one was not finite."""
        batches, times = self._batches, self.times
        self._batches, self.times = [], []
        if not batches:
            return None
        losses = torch.cat([losses for _, _, losses in batches])
        bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        if bad:
            jobs = [job for ranks, steps, _ in batches for job in zip(ranks, steps, strict=True)]
            when = {(rank, step): time for rank, step, time in zip(times[::3], times[1::3], times[2::3], strict=True)}
            raise Diverged(*min((when[jobs[k]], *jobs[k]) for k in bad))
        return float(losses.double().mean())
