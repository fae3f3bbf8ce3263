"""Models that are a chain of linear layers and element-wise functions, evaluated for many workers at once.

``vmap`` handles any model, but turns a linear layer into half a dozen operations; with a few small models that is most
of the time. Here it is one batched matrix product for all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

Layer = Callable[[dict[str, Tensor], Tensor], Tensor]
"""``layer(parameters by name, inputs)``; the first dimension of every tensor is the worker."""

ELEMENTWISE = (nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Softplus)
"""Modules that need no change for a dimension of workers."""


class UnsupportedModule(Exception):
    """The model has a module that is neither linear nor element-wise."""


class BatchedMLP:
    """A model as a function of the parameters of several workers."""

    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers

    @classmethod
    def of(cls, model: nn.Module) -> BatchedMLP | None:
        """Return the batched form of ``model``, or None if it has another structure or hooks on its calls."""
        if _has_any_global_hook():
            return None
        names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        try:
            return cls(list(_layers(model, names)))
        except UnsupportedModule:
            return None

    def __call__(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(parameters, inputs)
        return inputs


def _layers(module: nn.Module, names: dict[int, str]) -> Iterator[Layer]:
    """Yield the layers in the order of their calls. ``names`` maps the ids of trained parameters to their names."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) or "forward" in vars(module):
        raise UnsupportedModule
    if type(module) is nn.Sequential:
        for inner in module:
            yield from _layers(inner, names)
    elif type(module) is nn.Linear:
        tensors = [module.weight] if module.bias is None else [module.weight, module.bias]
        if not all(id(tensor) in names for tensor in tensors):
            raise UnsupportedModule
        yield _linear(*(names[id(tensor)] for tensor in tensors))
    elif type(module) is nn.Flatten:
        yield _flatten(module.start_dim, module.end_dim)
    elif type(module) in ELEMENTWISE:
        yield lambda parameters, inputs: module(inputs)
    else:
        raise UnsupportedModule


def _linear(weight: str, bias: str | None = None) -> Layer:
    def layer(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        # A worker's input may be one vector, a batch of them, or a batch with several dimensions.
        vectors = inputs[:, None] if inputs.dim() == 2 else inputs.flatten(1, -2)
        transposed = parameters[weight].mT
        if bias is None:
            outputs = torch.bmm(vectors, transposed)
        else:
            outputs = torch.baddbmm(parameters[bias][:, None], vectors, transposed)
        return outputs if inputs.dim() == 3 else outputs.view(*inputs.shape[:-1], -1)

    return layer


def _flatten(start: int, end: int) -> Layer:
    # Dimensions counted from the front move by one, behind that of the workers.
    start, end = (dim + 1 if dim >= 0 else dim for dim in (start, end))
    return lambda parameters, inputs: inputs.flatten(start, end)
