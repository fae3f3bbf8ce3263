"""The ways to a gradient: one worker's model after the other, or many at once; ``graphs`` has the same by CUDA graphs.

All of them replace rows of points by the gradients there, let batch norm write into the rows of buffers, and return
the losses. They agree up to rounding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossamer import memory
from gossamer.errors import InputError
from gossamer.flat import Flat
from gossamer.tasks import Task
from gossamer.virtual.compute.blocks import scatter

LossesAt = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor], Tensor]
"""``losses(parameters by name, buffers by name, inputs, targets)``, of several workers along the first dimension."""


Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
"""What a model's forward pass runs under."""


class GradientBackend(Protocol):
    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        """Gradients at the rows ``ranks`` (``index``: the same on the device)."""


class FunctionalModel:
    """Calls a model with other tensors in the place of its parameters and buffers.

    As ``torch.func.functional_call`` does, which looks for their places anew each time.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        named = [*model.named_parameters(), *model.named_buffers()]
        names = {id(tensor): name for name, tensor in named}
        self.places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name, _ in named}
        """Tied ones have several."""
        for module in model.modules():
            members: dict[str, Any]
            for members in (module._parameters, module._buffers):
                for own, tensor in members.items():
                    if tensor is not None:
                        self.places[names[id(tensor)]].append((members, own))

    def __call__(self, named: dict[str, Tensor], inputs: Tensor) -> Any:
        """What the model gives for ``inputs`` with the tensors of these names."""
        places = [(members, own, tensor) for name, tensor in named.items() for members, own in self.places[name]]
        before = [members[own] for members, own, _ in places]
        try:
            for members, own, tensor in places:
                members[own] = tensor
            return self.model(inputs)
        finally:
            for (members, own, _), tensor in zip(places, before, strict=True):
                members[own] = tensor


class SequentialBackend:
    """One worker after the other.

    A worker's row is copied into the vector that the parameters of one model are views of; ``backward`` adds to
    gradients that are views of another. For a small model that takes half the time of ``functional_call``. On a GPU
    the gradients that ``backward`` makes are copied into the row by one launch, where adding would take one for each of
    them. ``in_place``, for long rows: they are copied as well, and the row itself becomes the vector of the parameters.
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
    ) -> None:
        self.task, self.autocast, self.in_place = task, autocast, in_place
        self.point = memory.zeros(flat.size, flat.dtype, device)
        self.gradient = None if in_place or device.type != "cpu" else memory.zeros_like(self.point)
        """On a CPU, for short rows: the vector that gradients of ``viewing`` are views of, and are added to."""
        self.buffers = torch.zeros(buffer_flat.size, dtype=buffer_flat.dtype, device=device)
        # A vector of several dtypes is of the widest: what is narrower cannot be a view of it; nor can what would lie
        # where a GPU cannot use it.
        viewing, apart = flat.split(self.point)
        named = dict(model.named_parameters())
        made = {part.name: nn.Parameter(torch.empty(0, dtype=part.dtype, device=device)) for part in flat.parts}
        # The copy takes these in the place of the model's own parameters.
        self.model = _copied(model, {named[name]: parameter for name, parameter in made.items()}).train()
        self.viewing = [(part, made[part.name]) for part in viewing]
        self.apart = [(part, made[part.name]) for part in apart]
        """Parameters that are not views."""
        self._look_at(self.point)
        for part, parameter in self.apart:
            parameter.data = torch.empty_strided(part.shape, part.strides, dtype=part.dtype, device=device)
        buffers = dict(self.model.named_buffers())
        buffers_viewing, buffers_apart = buffer_flat.split(self.buffers)
        self.buffers_apart = [(part, buffers[part.name]) for part in buffers_apart]
        self.fetched = [*self.viewing, *self.apart] if self.gradient is None else self.apart
        """Parameters whose gradients are not views."""
        self._written: set[str] = set()
        """Names of parts of the point that have been replaced already."""
        if self.gradient is not None:
            for part, parameter in self.viewing:
                parameter.grad = part.view(self.gradient)
        for part in buffers_viewing:
            buffers[part.name].data = part.view(self.buffers)
        self.counters = [buffer for buffer in buffers.values() if not buffer.is_floating_point()]
        self.counted = [counter.clone() for counter in self.counters]

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        losses = []
        for rank, x, y in zip(ranks, inputs, targets, strict=True):
            row = points[rank]
            self.buffers.copy_(buffers[rank])
            if self.in_place:
                self._look_at(row)
            else:
                self.point.copy_(row)
            losses.append(self.compute(x, y))
            self.write(row)
            buffers[rank].copy_(self.buffers)
        return torch.stack(losses)

    def _look_at(self, row: Tensor) -> None:
        """Let this be the vector behind the parameters."""
        self.point = row
        for part, parameter in self.viewing:
            # Not a view for autograd: who writes into one parameter does not write into the others.
            parameter.data = part.view(row)

    @torch.no_grad()
    def compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss at ``self.point``; its gradient is what the parameters have then."""
        self._written.clear()
        if self.gradient is not None:
            self.gradient.zero_()
        for part, parameter in self.apart:
            parameter.copy_(part.view(self.point))
        for part, buffer in self.buffers_apart:
            buffer.copy_(part.view(self.buffers))
        if self.counters:
            torch._foreach_copy_(self.counters, self.counted)
        with torch.enable_grad(), fastest_convolutions():
            data = inputs if self.task.prepare is None else self.task.prepare(inputs)
            with self.autocast():
                outputs = self.model(data).to(self.point.dtype)
            loss = self.task.loss(outputs, targets)
            loss.backward()
        for part, buffer in self.buffers_apart:
            part.view(self.buffers).copy_(buffer)
        return loss.detach()

    @torch.no_grad()
    def write(self, row: Tensor) -> None:
        """Replace ``row`` by the gradient; what ``backward`` has made for it is dropped."""
        if self.gradient is not None:
            row.copy_(self.gradient)
        for part, parameter in self.fetched:
            if parameter.grad is None and part.name not in self._written:
                part.view(row).zero_()
        _move([(part.view(row), parameter) for part, parameter in self.fetched if parameter.grad is not None])

    @torch.no_grad()
    def write_early(self) -> None:
        """Replace those parts of the point whose gradients are there, for which ``backward`` should have no more use.

        Should it have one all the same, torch says so, since it is the parameters that are written.
        """
        made = {part.name for part, parameter in self.fetched if parameter.grad is not None}
        self._written |= made
        _move([(parameter, parameter) for part, parameter in self.viewing if part.name in made])
        _move([(part.view(self.point), parameter) for part, parameter in self.apart if part.name in made])


def _copied(model: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> nn.Module:
    """A copy of the model, with ``others`` in the place of its parameters."""
    advice = "(for its gradients one worker after the other): take --gradient-backend batched"
    try:
        copied = copy.deepcopy(model, {id(own): other for own, other in others.items()})
    except (TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{type(model).__name__} cannot be copied {advice}; {reason}") from error
    if {id(other) for other in others.values()} - {id(parameter) for parameter in copied.parameters()}:
        raise InputError(f"{type(model).__name__} copies itself in a way of its own, without its parameters {advice}")
    return copied


def _move(places: list[tuple[Tensor, nn.Parameter]]) -> None:
    """Copy the gradients of parameters to their places, and drop them."""
    gradients = [parameter.grad for _, parameter in places if parameter.grad is not None]
    if gradients:
        torch._foreach_copy_([place for place, _ in places], gradients)
    for _, parameter in places:
        parameter.grad = None


class BatchedBackend:
    """Many workers by one pass over their rows."""

    def __init__(self, losses: LossesAt, flat: Flat, buffer_flat: Flat) -> None:
        self.losses, self.flat, self.buffer_flat = losses, flat, buffer_flat

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        first, end = ranks[0], ranks[0] + len(ranks)
        if ranks == list(range(first, end)):
            return self.compute(points[first:end], buffers[first:end], inputs, targets)
        some, own = points.index_select(0, index), buffers.index_select(0, index)
        losses = self.compute(some, own, inputs, targets)
        scatter(points, index, some)
        scatter(buffers, index, own)
        return losses

    @torch.no_grad()
    def compute(self, points: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Replace all ``points`` by their gradients; the losses."""
        # Each parameter is a leaf of its own: the derivative of taking a piece of a row is a whole row of zeros.
        leaves = {part.name: part.view(points).to(part.dtype).detach().requires_grad_() for part in self.flat.parts}
        # And so each buffer: under vmap batch norm would write into a copy of what is only a piece of a row.
        own = {part.name: part.view(buffers).to(part.dtype).contiguous() for part in self.buffer_flat.parts}
        with torch.enable_grad():
            losses = self.losses(leaves, own, inputs, targets)
            gradients = torch.autograd.grad(
                losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
            )
        for part, gradient in zip(self.flat.parts, gradients, strict=True):
            part.view(points).copy_(gradient)
        for part in self.buffer_flat.parts:
            part.view(buffers).copy_(own[part.name])
        return losses.detach()


@contextlib.contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN time its algorithms once and keep the fastest: a gradient's shapes are always the same."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
