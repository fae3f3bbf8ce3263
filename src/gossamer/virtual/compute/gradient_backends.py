"""Gradient backends: gradients of one worker's model after the other, or of many at once.

Every backend replaces rows of parameters by the gradients there, updates the rows of buffers (batch norm's running
statistics) and returns the losses. Backends agree up to rounding. ``cuda_graphs`` has the same two as captured CUDA
graphs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossamer.errors import InputError
from gossamer.tasks import Task
from gossamer.vectors import memory
from gossamer.vectors.flat import Flat
from gossamer.virtual.compute.matrix import scatter

BatchedLosses = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor], Tensor]
"""``losses(parameters by name, buffers by name, inputs, targets)``; the first dimension of all tensors: the worker."""

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
"""Returns the context in which a model's forward pass runs."""


class GradientBackend(Protocol):
    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        """Replace the rows ``ranks`` of ``points`` by the gradients there and return the losses.

        ``index`` holds the ranks on the device. ``inputs`` and ``targets`` hold one mini-batch per rank.
        """


class FunctionalModel:
    """Calls a model with other tensors in place of its parameters and buffers.

    Does the same as ``torch.func.functional_call``, which searches the modules for the names at every call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        named = [*model.named_parameters(), *model.named_buffers()]
        names = {id(tensor): name for name, tensor in named}
        self.owners: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name, _ in named}
        """For each name the module dictionaries that hold the tensor, with the key. Tied tensors have several."""
        for module in model.modules():
            members: dict[str, Any]
            for members in (module._parameters, module._buffers):
                for key, tensor in members.items():
                    if tensor is not None:
                        self.owners[names[id(tensor)]].append((members, key))

    def __call__(self, named: dict[str, Tensor], inputs: Tensor) -> Any:
        """Return the model's outputs for ``inputs`` with the tensors ``named``."""
        entries = [(members, key, tensor) for name, tensor in named.items() for members, key in self.owners[name]]
        before = [members[key] for members, key, _ in entries]
        try:
            for members, key, tensor in entries:
                members[key] = tensor
            return self.model(inputs)
        finally:
            for (members, key, _), tensor in zip(entries, before, strict=True):
                members[key] = tensor


class SequentialBackend:
    """Evaluates one worker after the other on a single copy of the model.

    The parameters of that copy are views of one vector, ``point``; a worker's row is copied into it. On a CPU the
    gradients are views of a second vector, and ``backward`` adds to them: for a small model that takes half the time
    of ``functional_call``. On a GPU, ``backward`` makes new gradient tensors, and one launch copies all of them into
    the row, where adding would take a launch for each.

    ``in_place``, for long rows, avoids the copy of the row: the row itself becomes ``point``, and gradients are copied
    as on a GPU.

    ``compiles``: ``torch.compile`` fuses the kernels of the copy, at its first gradient.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        flat: Flat,
        buffer_flat: Flat,
        device: torch.device,
        autocast: Autocast = contextlib.nullcontext,
        in_place: bool = False,
        compiles: bool = False,
    ) -> None:
        self.task, self.autocast, self.in_place = task, autocast, in_place
        self.point = memory.zeros(flat.size, flat.dtype, device)
        self.gradient = None if in_place or device.type != "cpu" else memory.zeros_like(self.point)
        """The vector that the gradients of ``viewed`` are views of, if they are."""
        self.buffers = torch.zeros(buffer_flat.size, dtype=buffer_flat.dtype, device=device)
        # Some tensors cannot be views: those narrower than the vector's dtype, and those that a GPU cannot use at
        # their address.
        viewed, separate = flat.split(self.point)
        named = dict(model.named_parameters())
        parameters = {part.name: nn.Parameter(torch.empty(0, dtype=part.dtype, device=device)) for part in flat.parts}
        self.model = _copy_model(model, {named[name]: parameter for name, parameter in parameters.items()}).train()
        self.viewed = [(part, parameters[part.name]) for part in viewed]
        self.separate = [(part, parameters[part.name]) for part in separate]
        """Parameters with memory of their own."""
        self._use_point(self.point)
        for part, parameter in self.separate:
            parameter.data = torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=device)
        buffers = dict(self.model.named_buffers())
        buffers_viewed, buffers_separate = buffer_flat.split(self.buffers)
        self.buffers_separate = [(part, buffers[part.name]) for part in buffers_separate]
        self.copied = [*self.viewed, *self.separate] if self.gradient is None else self.separate
        """Parameters whose gradients are not views, so that ``write_gradient`` copies them."""
        if self.gradient is not None:
            for part, parameter in self.viewed:
                parameter.grad = part.view(self.gradient)
        for part in buffers_viewed:
            buffers[part.name].data = part.view(self.buffers)
        self.counters = [buffer for buffer in buffers.values() if not buffer.is_floating_point()]
        self.initial_counters = [counter.clone() for counter in self.counters]
        if compiles:
            self.model.compile(dynamic=False)

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        losses = []
        for rank, x, y in zip(ranks, inputs, targets, strict=True):
            row = points[rank]
            self.buffers.copy_(buffers[rank])
            if self.in_place:
                self._use_point(row)
            else:
                self.point.copy_(row)
            losses.append(self.compute(x, y))
            self.write_gradient(row)
            buffers[rank].copy_(self.buffers)
        return torch.stack(losses)

    def _use_point(self, row: Tensor) -> None:
        self.point = row
        for part, parameter in self.viewed:
            # Through .data, so that autograd does not take a write to one parameter for a write to all of them.
            parameter.data = part.view(row)

    @torch.no_grad()
    def compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss at ``self.point``. The parameters hold its gradient afterwards."""
        if self.gradient is not None:
            self.gradient.zero_()
        for part, parameter in self.separate:
            parameter.copy_(part.view(self.point))
        for part, buffer in self.buffers_separate:
            buffer.copy_(part.view(self.buffers))
        if self.counters:
            torch._foreach_copy_(self.counters, self.initial_counters)
        with torch.enable_grad(), fastest_convolutions():
            data = inputs if self.task.prepare is None else self.task.prepare(inputs)
            with self.autocast():
                outputs = self.model(data).to(self.point.dtype)
            loss = self.task.loss(outputs, targets)
            loss.backward()
        for part, buffer in self.buffers_separate:
            part.view(self.buffers).copy_(buffer)
        return loss.detach()

    @torch.no_grad()
    def write_gradient(self, row: Tensor) -> None:
        """Replace ``row`` by the gradient and drop the tensors that ``backward`` made for it."""
        if self.gradient is not None:
            row.copy_(self.gradient)
        views, gradients = [], []
        for part, parameter in self.copied:
            if parameter.grad is None:
                part.view(row).zero_()
            else:
                views.append(part.view(row))
                gradients.append(parameter.grad)
                parameter.grad = None
        if gradients:
            torch._foreach_copy_(views, gradients)


def _copy_model(model: nn.Module, replacements: dict[nn.Parameter, nn.Parameter]) -> nn.Module:
    """Return a copy of the model with other parameters in place of its own."""
    advice = "(for its gradients one worker after the other): take --gradient-backend batched"
    try:
        copied = copy.deepcopy(model, {id(own): other for own, other in replacements.items()})
    except (TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{type(model).__name__} cannot be copied {advice}; {reason}") from error
    if {id(other) for other in replacements.values()} - {id(parameter) for parameter in copied.parameters()}:
        raise InputError(f"{type(model).__name__} defines a __deepcopy__ that drops its parameters {advice}")
    return copied


class BatchedBackend:
    """Evaluates many workers in one forward and backward pass over their rows."""

    def __init__(self, losses: BatchedLosses, flat: Flat, buffer_flat: Flat) -> None:
        self.losses, self.flat, self.buffer_flat = losses, flat, buffer_flat

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        first, end = ranks[0], ranks[0] + len(ranks)
        if ranks == list(range(first, end)):
            return self.compute(points[first:end], buffers[first:end], inputs, targets)
        point_block, buffer_block = points.index_select(0, index), buffers.index_select(0, index)
        losses = self.compute(point_block, buffer_block, inputs, targets)
        scatter(points, index, point_block)
        scatter(buffers, index, buffer_block)
        return losses

    @torch.no_grad()
    def compute(self, points: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Replace all ``points`` by their gradients and return the losses."""
        # Each parameter is a leaf of its own: the derivative of a slice of a row would be a whole row of zeros.
        leaves = {part.name: part.view(points).to(part.dtype).detach().requires_grad_() for part in self.flat.parts}
        # Each buffer is contiguous: under vmap, batch norm would write into a copy of a slice.
        named = {part.name: part.view(buffers).to(part.dtype).contiguous() for part in self.buffer_flat.parts}
        with torch.enable_grad():
            losses = self.losses(leaves, named, inputs, targets)
            gradients = torch.autograd.grad(
                losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        for part, gradient in zip(self.flat.parts, gradients, strict=True):
            part.view(points).copy_(gradient)
        for part in self.buffer_flat.parts:
            part.view(buffers).copy_(named[part.name])
        return losses.detach()


@contextlib.contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN time its algorithms once and keep the fastest: the shapes of gradients never change."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
