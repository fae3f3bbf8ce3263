"""What the user's call of ``optimizer.step`` needs before a method can look at the gradient."""

from __future__ import annotations

from typing import Any

import torch


def prepare(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """A step pre-hook: have the gradient in place, and in its own scale.

    A closure is evaluated here, where the weights are still those of the forward pass, and the optimizer is handed
    its result. A ``GradScaler`` leaves the loss scale in the gradients of fused optimizers, and workers' scales differ.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None and not overflowed(optimizer):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    return None if closure is None else (args, kwargs)


def overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a ``GradScaler`` lets a fused optimizer pass over this step. It skips the call for all others."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
