"""What a job to train consists of, and what a person may choose about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from gossamer.errors import InputError
from gossamer.settings import Settings, option

# Run settings that a task may suggest in `defaults`.
SETTINGS = ("optimizer", "lr", "momentum", "batch", "steps", "weight_decay")


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Settings):
    """What can be chosen about the built-in tasks; each task uses some of these."""

    model: str = option("", "which of the task's models to train; empty: its default")
    data: str = option("", "path of the data: a text file, or a folder of images")
    dim: int = option(64, "length of the parameter vector (consensus, quadratic)", least=1)
    noise: float = option(
        0.0, "standard deviation of the noise added to every gradient (quadratic)", least=0, most=1e30
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A job to train: model, data, loss and metric.

    A mini-batch takes this way: `train[0][indices]`, then `augment` (outside of vmap, on the raw inputs), then
    `prepare`, the model and `loss`. The test set takes the same way without `augment`. Everything from
    `prepare` on can run under `torch.func.vmap` with one set of parameters per worker.
    """

    name: str
    # A fresh model; the caller seeds torch before calling.
    model: Callable[[], nn.Module]
    # Inputs and targets; the first dimension is the sample.
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    # (outputs, targets) -> mean loss, a scalar.
    loss: Callable[[Tensor, Tensor], Tensor]
    # (outputs, targets) -> fraction right, a scalar. None: the task has no accuracy.
    correct: Callable[[Tensor, Tensor], Tensor] | None = None
    # The class of each train sample, for partitions by class. None: only iid works.
    labels: np.ndarray | None = None
    # Raw inputs of one mini-batch -> the same, augmented with draws from the generator.
    augment: Callable[[Tensor, np.random.Generator], Tensor] | None = None
    # Raw inputs -> model inputs, on the device, so that the data set may stay small (uint8) in memory.
    prepare: Callable[[Tensor], Tensor] | None = None
    # Worker i owns exactly sample i: partitions do not apply.
    own_data: bool = False
    # False: there is nothing to differentiate, workers only average.
    gradients: bool = True
    # (rank, rng) -> this worker's own initial flat vector. None: all start from the one model.
    start: Callable[[int, np.random.Generator], np.ndarray] | None = None
    # Run settings that suit the task. `lr` is one number, or a dict with one per optimizer name.
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part, (inputs, targets) in (("train", self.train), ("test", self.test)):
            if len(inputs) != len(targets) or len(inputs) == 0:
                raise InputError(
                    f"task {self.name!r}: {part} has {len(inputs)} inputs and {len(targets)} targets: "
                    "expected the same number, at least one."
                )
        if self.labels is not None and len(self.labels) != len(self.train[0]):
            raise InputError(
                f"task {self.name!r}: {len(self.labels)} labels for {len(self.train[0])} train samples: "
                "expected one label per sample."
            )
        for setting in self.defaults:
            if setting not in SETTINGS:
                raise InputError(
                    f"task {self.name!r}: unknown setting {setting!r} in defaults: "
                    f"expected some of {', '.join(SETTINGS)}."
                )
