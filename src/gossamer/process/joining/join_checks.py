"""What ``gossamer.join`` checks on each worker by itself, before it communicates.

Each check raises an ``InputError`` that says what to do. A parameter that is frozen may be in the optimizer: it has no
gradient, so no optimizer touches it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gossamer.errors import InputError
from gossamer.process.lifecycle import Lifecycle
from gossamer.process.runtime.flat_model import FlatModel, plain_name

WRAPPERS = {
    "DistributedDataParallel": "it would average the gradients too",
    "DataParallel": "it uses several devices, and a worker has one",
    "FullyShardedDataParallel": "it holds a part of each parameter only",
    "FSDPModule": "it holds a part of each parameter only",
    "DeepSpeedEngine": "it trains with an optimizer of its own",
}
"""Wrappers of models that train on several devices themselves, by class, and why a worker cannot use them."""

WITH_MESH = ("DistributedDataParallel", "FSDPModule")
"""Those that a worker of several ranks may use."""

PASSING_WRAPPERS = ("AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer")
"""Wrappers of optimizers whose ``step()`` calls that of the optimizer inside, with its hooks: Accelerate's, Lightning's
and Fabric's."""

SHARDING_OPTIMIZERS = ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer", "_NamedOptimizer", "DeepSpeedOptimizer")
"""Optimizers that communicate themselves."""


_joined: weakref.WeakKeyDictionary[FlatModel, Lifecycle] = weakref.WeakKeyDictionary()
"""The models that this process has joined, and whether they have finished."""


def register(flat_model: FlatModel, lifecycle: Lifecycle) -> None:
    """Remember that a model has been joined, until it is closed."""
    _joined[flat_model] = lifecycle


def check(model: Any, optimizer: Any, in_replica: bool = False) -> tuple[nn.Module, Optimizer]:
    """Return the model and the optimizer to join. InputError if they cannot be.

    ``in_replica``: the worker has several ranks, and the model may be sharded over them.
    """
    if isinstance(model, Optimizer) and isinstance(optimizer, nn.Module):
        raise InputError("the optimizer is given before the model: call gossamer.join(model, optimizer)")
    model, optimizer = unwrap_model(model), unwrap_optimizer(optimizer)
    check_model(model, in_replica)
    check_parameters(model, optimizer)
    return model, optimizer


# The model


def unwrap_model(model: Any) -> nn.Module:
    """Return the module itself if ``torch.compile`` has wrapped it: both have the same parameters."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(f"the first argument of join is {given}: expected the model, a torch.nn.Module")
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def check_model(model: nn.Module, in_replica: bool = False) -> None:
    for name, module in model.named_modules():
        kind = _find_kind(module, WRAPPERS)
        if kind is not None and not (in_replica and kind == "FSDPModule"):
            inner = f"model.{name}.module" if name else "model.module"
            remedy = "do not shard it" if kind == "FSDPModule" else f"drop the wrapper and join {inner}"
            where = f"the layer {name}" if name else "the model"
            several = "; or give join the mesh of a worker of several devices" if kind in WITH_MESH else ""
            raise InputError(
                f"{where} is wrapped in {kind}, and {WRAPPERS[kind]}: {remedy}, with one process for each "
                f"device{several}"
            )
    trainable = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise InputError(
            f"{type(model).__name__} has no trainable parameters, so there is nothing to train: "
            "set requires_grad on some before join"
        )
    for name, p in [*trainable, *((plain_name(name), b) for name, b in model.named_buffers())]:
        if p.is_meta:
            raise InputError(
                f"{name} is on the meta device and has no values: create the model on a device, or load its weights "
                "(model.to_empty(device=…) and load_state_dict), before join"
            )
    for name, p in trainable:
        if p.is_complex():
            raise InputError(
                f"{name} is complex, and workers average real numbers: make the parameter a real one with a last "
                "dimension of 2, and use torch.view_as_complex of it"
            )
        if _find_kind(p, ("DTensor",)) and not in_replica:
            raise InputError(
                f"{name} is a DTensor, of which this process holds a part: do not call fully_shard or "
                "parallelize_module, and run one process for each device; or give join the mesh"
            )
        if _find_kind(p, ("UninitializedParameter",)):
            raise InputError(f"{name} of a lazy layer has no shape yet: run the model once on an input before join")
    taken = {id(p) for joined, lifecycle in _joined.items() if not lifecycle.closed for p in joined.parameters}
    both = [name for name, p in trainable if id(p) in taken]
    if both:
        what = "this model" if len(both) == len(trainable) else f"a model that has the parameter {both[0]} too"
        raise InputError(f"{what} is joined already: join it once, or call finish() or close() on its swarm first")


# The optimizer


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer whose ``step()`` has the hooks. InputError if there is none to be found."""
    kind = type(optimizer).__name__
    if inspect.isclass(optimizer):
        raise InputError(
            f"the optimizer is the class {optimizer.__name__}: create it, as {optimizer.__name__}(model.parameters())"
        )
    if isinstance(optimizer, LRScheduler | ReduceLROnPlateau):
        raise InputError(f"{kind} is a learning-rate schedule: give join the optimizer that it schedules")
    if kind == "GradScaler":
        raise InputError("a GradScaler is no optimizer: give join the optimizer, and call scaler.step(optimizer)")
    if _find_kind(optimizer, SHARDING_OPTIMIZERS):
        raise InputError(f"{kind} communicates with the other workers itself: give join a plain torch optimizer")
    inner = getattr(optimizer, "optimizer", None)
    if _find_kind(optimizer, PASSING_WRAPPERS) and inner is not None:
        return unwrap_optimizer(inner)
    if not isinstance(optimizer, Optimizer):
        wraps = isinstance(inner, Optimizer)
        remedy = f"give the {type(inner).__name__} inside, if its step() is called" if wraps else "give one"
        raise InputError(f"the second argument of join is a {kind}: expected a torch.optim.Optimizer; {remedy}")
    if not has_hooks(optimizer):
        remedy = "give join the optimizer inside" if isinstance(inner, Optimizer) else "call super().__init__ in it"
        raise InputError(f"step() of {kind} runs no hooks, so the swarm would not see its steps: {remedy}")
    if isinstance(optimizer, LBFGS):
        raise InputError("LBFGS takes several gradients per step, workers exchange after one: take another optimizer")
    return optimizer


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer.step()`` calls step hooks, which ``Optimizer.__init__`` arranges."""
    return "_optimizer_step_pre_hooks" in vars(optimizer) and hasattr(type(optimizer).step, "hooked")


def check_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that the optimizer has exactly the trainable parameters of the model."""
    kind = type(optimizer).__name__
    own = {id(p) for p in model.parameters()}
    trainable = {id(p): plain_name(name) for name, p in model.named_parameters() if p.requires_grad}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held_ids = {id(p) for p in held}
    missing = [name for key, name in trainable.items() if key not in held_ids]
    foreign = sum(1 for p in held if p.requires_grad and id(p) not in own)
    if len(missing) == len(trainable):
        raise InputError(
            f"{kind} has none of the model's parameters: create it from model.parameters(), "
            "after the model has been moved, copied and changed for the last time"
        )
    if missing:
        raise InputError(
            f"{kind} lacks {len(missing)} of the model's {len(trainable)} trainable parameters, such as {missing[0]}: "
            "add them, set requires_grad=False on those that are not to be trained, or join each part of the model "
            "with the optimizer of that part"
        )
    if foreign:
        raise InputError(
            f"{kind} has {foreign} trainable parameter{'s' if foreign > 1 else ''} that the model does not have, and "
            "that workers would not share: make them a part of the model, or give them an optimizer of their own"
        )


def _find_kind(thing: Any, names: Iterable[str]) -> str | None:
    """Return the first of these names that a class of ``thing`` has. The libraries need not be loaded."""
    classes = {cls.__name__ for cls in type(thing).__mro__}
    return next((name for name in names if name in classes), None)
