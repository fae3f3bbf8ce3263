"""The optimizers by name."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from gossamer.errors import InputError, unknown
from gossamer.optim.accumadam import AccumAdam, AccumAdamW

_UNSUPPORTED = {
    "lbfgs": "evaluates the loss several times per step through a closure",
    "sparseadam": "needs sparse gradients",
}


def _of_torch() -> dict[str, type[Optimizer]]:
    """Return every optimizer of the installed torch, by its lower-cased class name."""
    classes = {}
    for value in vars(torch.optim).values():
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            classes[value.__name__.lower()] = value
    return {name: classes[name] for name in sorted(classes) if name not in _UNSUPPORTED}


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "accumadam": AccumAdam,
    "accumadamw": AccumAdamW,
    **_of_torch(),
}

_DEFAULT_LR = {
    "sgd": 0.05,
    "asgd": 0.05,
    "adadelta": 1.0,
    "adafactor": 1e-2,
    "adagrad": 1e-2,
    "rprop": 1e-2,
    "adamax": 2e-3,
    "nadam": 2e-3,
}
"""All others, Adam and its relatives, have 1e-3."""


def names() -> tuple[str, ...]:
    """Return the names that ``make`` accepts, in alphabetical order."""
    return tuple(sorted(OPTIMIZERS))


def make(
    name: str,
    params: ParamsT,
    *,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    period: int = 4,
) -> Optimizer:
    """Return a new optimizer of this name. Optimizers without momentum or period ignore those arguments.

    Examples:
        >>> make("sgd", [torch.zeros(3, requires_grad=True)], lr=0.1).defaults["momentum"]
        0.9
    """
    cls = _class_of(name)
    if not math.isfinite(lr):
        raise InputError(f"learning rate {lr} is not a finite number")
    accepted = inspect.signature(cls).parameters
    if weight_decay and "weight_decay" not in accepted:
        raise InputError(f"optimizer {name!r} has no weight decay: set weight_decay to 0, not {weight_decay}")
    values: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay, "period": period}
    arguments = {option: value for option, value in values.items() if option in accepted}
    try:
        return cls(params, lr=lr, **arguments)  # type: ignore[call-arg]
    except ValueError as error:
        raise InputError(f"optimizer {name!r}: {error}") from error


def default_lr(name: str) -> float:
    """Return a learning rate to start from, with the other defaults of ``make``."""
    _class_of(name)
    return _DEFAULT_LR.get(name, 1e-3)


def _class_of(name: str) -> type[Optimizer]:
    if name in _UNSUPPORTED:
        raise InputError(f"optimizer {name!r} cannot be used: it {_UNSUPPORTED[name]}; use one of {', '.join(names())}")
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]
