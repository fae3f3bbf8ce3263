"""The optimizers that can be asked for by name."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from gossamer.errors import InputError, unknown
from gossamer.optim.accumadam import AccumAdam, AccumAdamW

_LEFT_OUT = {
    "lbfgs": "it evaluates the loss several times per step through a closure",
    "sparseadam": "it needs sparse gradients",
}


def _of_torch() -> dict[str, type[Optimizer]]:
    """Every optimizer of the installed torch, by its lower-cased class name."""
    found = {}
    for value in vars(torch.optim).values():
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            found[value.__name__.lower()] = value
    return {name: found[name] for name in sorted(found) if name not in _LEFT_OUT}


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "accumadam": AccumAdam,
    "accumadamw": AccumAdamW,
    **_of_torch(),
}

# Adam-like optimizers, and any that a newer torch brings, start from 1e-3.
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

_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        AccumAdam,
        AccumAdamW,
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


def names() -> tuple[str, ...]:
    """All names that :func:`make` knows, in alphabetical order."""
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
    """An optimizer by name.

    ``momentum`` and ``period`` go to those that have them; the rest do not look at them.

    >>> make("sgd", [torch.zeros(3, requires_grad=True)], lr=0.1).defaults["momentum"]
    0.9
    """
    kind = _class_of(name)
    if not math.isfinite(lr):
        raise InputError(f"learning rate {lr} is not a finite number")
    accepted = inspect.signature(kind).parameters
    if weight_decay and "weight_decay" not in accepted:
        raise InputError(f"optimizer {name!r} has no weight decay: set weight_decay to 0, not {weight_decay}")
    offered: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay, "period": period}
    taken = {option: value for option, value in offered.items() if option in accepted}
    try:
        return kind(params, lr=lr, **taken)  # type: ignore[call-arg]
    except ValueError as error:
        raise InputError(f"optimizer {name!r}: {error}") from error


def default_lr(name: str) -> float:
    """A learning rate to start from, for an optimizer made with the other defaults of :func:`make`."""
    _class_of(name)
    return _DEFAULT_LR.get(name, 1e-3)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the update treats every element alone: it can run on one flat vector with the same result.

    Only exact types count: a subclass may do anything. All elements must share their hyper-parameters, and
    all must have a gradient in every step.
    """
    return type(optimizer) in _ELEMENTWISE


def _class_of(name: str) -> type[Optimizer]:
    if name in _LEFT_OUT:
        raise InputError(f"optimizer {name!r} is left out because {_LEFT_OUT[name]}: use one of {', '.join(names())}")
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]
