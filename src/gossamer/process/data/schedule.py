"""A learning-rate schedule that follows the progress of all workers, not the number of this worker's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gossamer.errors import InputError, unknown
from gossamer.schedules import SHAPES, Shape

NOT_SAVED = ("optimizer", "_factor", "_progress")


class ProgressLR(LRScheduler):
    """Learning rates are those at the start, times a factor that depends on ``swarm.progress``."""

    def __init__(self, optimizer: Optimizer, factor: Shape, progress: Callable[[], float], start: float) -> None:
        """``start``: the progress now. Nobody can tell it before the loop has begun."""
        self._factor, self._progress = factor, lambda: start
        super().__init__(optimizer)
        self._progress = progress

    def get_lr(self) -> list[Any]:
        factor = self._factor(self._progress())
        return [base * factor for base in self.base_lrs]

    def update(self) -> None:
        """Set the learning rates of this moment, without a step."""
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in NOT_SAVED}


def make_factor(shape: str | Shape, warmup: float, min_factor: float) -> Shape:
    """Return the function from progress to a factor: a straight line from 0, then the shape down to ``min_factor``."""
    if isinstance(shape, str) and shape not in SHAPES:
        raise unknown("schedule", shape, SHAPES)
    if not 0 <= warmup < 1:
        raise InputError(f"warmup is {warmup}: expected a share of the whole training, from 0 to below 1, such as 0.05")
    if not 0 <= min_factor <= 1:
        raise InputError(f"min_factor is {min_factor}: expected a factor on the learning rate, from 0 to 1")
    falling = SHAPES[shape] if isinstance(shape, str) else shape

    def factor(progress: float) -> float:
        if progress < warmup:
            return progress / warmup
        rest = min(1.0, (progress - warmup) / (1 - warmup))
        return min_factor + (1 - min_factor) * falling(rest)

    return factor
