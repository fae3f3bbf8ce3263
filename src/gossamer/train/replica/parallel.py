"""The parallelism inside a replica: DDP, or FSDP2 over the blocks of a model; and the pace of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

from gossamer.errors import InputError

FORWARD_SHARE = 1 / 3
"""Of the time of a gradient: the backward pass costs about two forward passes."""


def parallelize(model: nn.Module, inside: str, mesh: DeviceMesh) -> nn.Module:
    """Return the model spread over the ranks of ``mesh``, a dimension ``shard``: in DDP, or sharded by FSDP2."""
    if inside == "ddp":
        device = next(model.parameters()).device
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, process_group=mesh["shard"].get_group())
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise InputError(f"--inside fsdp cannot shard {name}, a single number: take --inside ddp")
    for block in blocks(model):
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the parts that FSDP2 gathers one after another: the elements of the model's outermost lists of modules.

    None if parts share a parameter, which has to be gathered with both of them.
    """
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                if any(True for _ in child.parameters()) and not isinstance(child, nn.ModuleList):
                    found.append(child)
            else:
                search(child)

    search(model)
    num_uses = [id(p) for block in found for p in block.parameters()]
    inside = set(num_uses)
    others = [id(p) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in inside]
    return found if len(others) == len(num_uses) == len(inside) else []


class SpreadPace:
    """Spreads the time that a gradient takes over forward and backward passes of the blocks of a model.

    What the ranks of a replica send each other meanwhile overlaps with it as with the compute of an accelerator.
    """

    def __init__(self, model: nn.Module, wait: Callable[[float], Any]) -> None:
        """``wait(seconds)`` stands for compute."""
        self.gradient_s = 0.0
        """How long the next gradient takes."""
        parts = blocks(model) or [model]
        sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
        for part, size in zip(parts, sizes, strict=True):
            part.register_forward_hook(partial(self._wait, size / sum(sizes), wait))

    def _wait(self, share: float, wait: Callable[[float], Any], module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Wait for the forward pass of one block, and when its backward pass begins, for that."""
        if torch.is_grad_enabled():
            wait(FORWARD_SHARE * share * self.gradient_s)
            backward_s = (1 - FORWARD_SHARE) * share * self.gradient_s

            def wait_backward(gradient: Tensor) -> None:
                wait(backward_s)

            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(wait_backward)
                    break
