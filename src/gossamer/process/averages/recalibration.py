"""Batch norm's statistics, estimated anew from mini-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gossamer.errors import InputError

Batch = TypeVar("Batch")


def recalibrate(
    model: nn.Module,
    device: torch.device,
    loader: Iterable[Batch],
    batches: int | None = None,
    forward: Callable[[Batch], object] | None = None,
) -> None:
    """Replace the running statistics of all batch-norm layers by their mean over mini-batches of ``loader``."""
    if batches is not None and batches < 1:
        raise InputError(f"batches is {batches}: expected 1 or more, or None for all")
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    if not layers:
        return
    modes = {module: module.training for module in model.modules()}
    momenta = {layer: layer.momentum for layer in layers}
    before = [{name: buffer.clone() for name, buffer in layer.named_buffers(recurse=False)} for layer in layers]
    run = forward or (lambda batch: _call(model, device, batch))
    done = 0
    try:
        # The other layers as in evaluation: dropout would change the statistics.
        model.eval()
        for layer in layers:
            layer.train()
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all mini-batches
        with torch.no_grad():
            for batch in itertools.islice(loader, batches):
                run(batch)
                done += 1
        if not done:
            raise InputError("recalibrate got no mini-batch: give a loader that can be iterated again")
    except BaseException:
        with torch.no_grad():
            for layer, buffers in zip(layers, before, strict=True):
                for name, buffer in layer.named_buffers(recurse=False):
                    buffer.copy_(buffers[name])
        raise
    finally:
        for layer, momentum in momenta.items():
            layer.momentum = momentum
        for module, training in modes.items():
            module.training = training


def _call(model: nn.Module, device: torch.device, batch: object) -> object:
    """Run the model on one mini-batch."""
    if isinstance(batch, Mapping):
        return model(**{name: _moved(value, device) for name, value in batch.items()})
    given = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(given, Tensor):
        raise InputError(
            f"recalibrate got a mini-batch of type {type(batch).__name__}: expected a tensor, a tuple or list that "
            "starts with one, or a dictionary; for others give forward=lambda batch: model(…)"
        )
    return model(_moved(given, device))


def _moved(value: object, device: torch.device) -> object:
    return value.to(device) if isinstance(value, Tensor) else value
