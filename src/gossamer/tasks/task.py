"""A task: model, data, loss and metric. Its options, and the loss and accuracy of classifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gossamer.errors import InputError
from gossamer.settings import Settings, option

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

DEFAULT_SETTINGS = ("optimizer", "lr", "momentum", "batch", "steps", "weight_decay")
"""Settings of a run that ``Task.defaults`` may contain."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Settings):
    """Options of the built-in tasks. Each task uses some of them."""

    model: str = option("", "which of the task's models to train; empty: its default")
    data: str = option("", "path of the data: a text file, or a folder of images or texts")
    dim: int = option(64, "length of the parameter vector (consensus, quadratic)", minimum=1)
    noise: float = option(
        0.0, "standard deviation of the noise added to every gradient (quadratic)", minimum=0, maximum=1e30
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A job to train: model, data, loss and metric.

    A mini-batch is ``train[0][indices]``. It goes through ``augment`` (outside of vmap, on the raw inputs),
    ``prepare``, the model and ``loss``. The test set skips ``augment``. Everything from ``prepare`` on may run under
    ``torch.func.vmap`` with one set of parameters per worker.
    """

    name: str
    """Its name in tables and messages."""
    model: Callable[[], nn.Module]
    """Returns a new model. The caller seeds torch first."""
    train: tuple[Tensor, Tensor]
    """Training inputs and targets. The first dimension counts samples."""
    test: tuple[Tensor, Tensor]
    """Test inputs and targets."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) → mean loss, a scalar."""
    correct: Callable[[Tensor, Tensor], Tensor] | None = None
    """(outputs, targets) → accuracy, a scalar from 0 to 1. None: the task has no accuracy."""
    labels: np.ndarray | None = None
    """Class of each training sample, for partitions by class. None: only the partition ``iid`` works."""
    augment: Callable[[Tensor, np.random.Generator], Tensor] | None = None
    """(raw inputs of one mini-batch, random generator) → augmented raw inputs."""
    augment_many: Callable[[Tensor, Sequence[np.random.Generator]], Tensor] | None = None
    """``augment`` for several mini-batches at once, along the first dimension, each with its own generator; the same
    numbers. None: one after the other, which takes longer on a GPU."""
    prepare: Callable[[Tensor], Tensor] | None = None
    """Raw inputs → inputs of the model, on the device: the data set can stay small (uint8) in memory."""
    own_data: bool = False
    """Whether worker i has exactly sample i, so that partitions do not apply."""
    gradients: bool = True
    """False: there is nothing to differentiate, workers only average."""
    start: Callable[[int, np.random.Generator], np.ndarray] | None = None
    """(rank, random generator) → initial flat parameters of that worker. None: all start from the same model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Settings that suit the task, such as ``{"batch": 64}``. ``lr`` is one number, or a dict by optimizer name."""

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
            if setting not in DEFAULT_SETTINGS:
                raise InputError(
                    f"task {self.name!r}: unknown setting {setting!r} in defaults: "
                    f"expected some of {', '.join(DEFAULT_SETTINGS)}."
                )


def cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits [..., classes] against integer classes [...] of any integer type."""
    from torch.nn import functional as F

    return F.cross_entropy(logits.flatten(0, -2), classes.flatten().long())


def cross_entropies(logits: Tensor, classes: Tensor) -> Tensor:
    """Return ``cross_entropy`` of several models along the first dimension; several times faster than with vmap."""
    from torch.nn import functional as F

    losses = F.cross_entropy(logits.flatten(0, -2), classes.flatten().long(), reduction="none")
    return losses.view(len(logits), -1).mean(1)


def accuracy(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the share of predictions whose largest logit is the right class."""
    return (logits.argmax(-1) == classes).float().mean()
