"""The ways to a gradient: one worker's model after the other, or many at once; launched plainly, or by CUDA graphs.

All of them replace rows of points by the gradients there, let batch norm write into the rows of buffers, and return
the losses. They agree up to rounding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from gossamer import memory
from gossamer.flat import Flat, Part
from gossamer.tasks import Task
from gossamer.virtual.blocks import scatter

LANES = 4
"""Workers whose gradients a captured graph computes side by side."""

T = TypeVar("T")

LossesAt = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor], Tensor]
"""``losses(parameters by name, buffers by name, inputs, targets)``, of several workers along the first dimension."""


Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
"""What a model's forward pass runs under."""


class Way(Protocol):
    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        """Gradients at the rows ``ranks`` (``index``: the same on the device)."""


class StandIns:
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


class Single:
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
        # The copy takes these in the place of the model's own parameters, which are not copied.
        views = {id(named[part.name]): nn.Parameter(part.view(self.point)) for part in viewing}
        self.model = copy.deepcopy(model, views).train()
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        self.viewing = [(part, parameters[part.name]) for part in viewing]
        self.apart = [(part, parameters[part.name]) for part in apart]
        """Parameters that are not views."""
        buffers_viewing, buffers_apart = buffer_flat.split(self.buffers)
        self.buffers_apart = [(part, buffers[part.name]) for part in buffers_apart]
        self.fetched = [*self.viewing, *self.apart] if self.gradient is None else self.apart
        """Parameters whose gradients are not views."""
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
            self.write(self.take(), row)
            buffers[rank].copy_(self.buffers)
        return torch.stack(losses)

    def _look_at(self, row: Tensor) -> None:
        """Let this be the vector behind the parameters."""
        self.point = row
        for part, parameter in self.viewing:
            parameter.data = part.view(row)

    @torch.no_grad()
    def compute(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss at ``self.point``; its gradient is what the parameters have then."""
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

    def take(self) -> list[Tensor | None]:
        """The gradients that are not views, taken from the parameters: ``backward`` makes new ones next time."""
        made = [parameter.grad for _, parameter in self.fetched]
        for _, parameter in self.fetched:
            parameter.grad = None
        return made

    def write(self, made: list[Tensor | None], row: Tensor) -> None:
        """Replace ``row`` by the gradient, of which these are the parts that are not views."""
        if self.gradient is not None:
            row.copy_(self.gradient)
        copied: list[tuple[Tensor, Tensor]] = []
        for (part, _), gradient in zip(self.fetched, made, strict=True):
            own = part.view(row)
            if gradient is None:
                own.zero_()
            else:
                copied.append((own, gradient))
        if copied:
            torch._foreach_copy_([own for own, _ in copied], [gradient for _, gradient in copied])


class SingleGraph:
    """A few workers side by side, each with a model of its own, by one launch of a captured CUDA graph.

    One worker's kernels leave much of a large GPU idle; those of several share it.
    """

    def __init__(self, make: Callable[[], Single]) -> None:
        self.make = make
        self.alone: _SideBySide | None = None
        self.together: _SideBySide | None = None

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        if self.alone is None or self.together is None:
            lanes = [_Lane(self.make(), inputs[0], targets[0]) for _ in range(LANES)]
            self.alone, self.together = _SideBySide(lanes[:1]), _SideBySide(lanes)
        if len(ranks) == LANES:
            return self.together(points, buffers, ranks, inputs, targets)
        each = [
            self.alone(points, buffers, [rank], x[None], y[None])
            for rank, x, y in zip(ranks, inputs, targets, strict=True)
        ]
        return torch.cat(each)


class _Lane:
    """One of the models side by side, and what is copied into it."""

    def __init__(self, single: Single, inputs: Tensor, targets: Tensor) -> None:
        self.single, self.stream = single, torch.cuda.Stream(inputs.device)
        self.inputs, self.targets = inputs.clone(), targets.clone()
        self.loss = torch.zeros((), dtype=single.point.dtype, device=inputs.device)

    def compute(self) -> list[Tensor | None]:
        """The gradients, in the layout of a row, so that a graph's are copied into one by one launch."""
        self.loss.copy_(self.single.compute(self.inputs, self.targets))
        parts = (part for part, _ in self.single.fetched)
        return [
            None if gradient is None else _laid_out(gradient, part)
            for part, gradient in zip(parts, self.single.take(), strict=True)
        ]


def _laid_out(gradient: Tensor, part: Part) -> Tensor:
    if gradient.stride() == part.strides:
        return gradient
    return torch.empty_strided(part.shape, part.strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class _SideBySide:
    """A captured graph of one or several lanes."""

    def __init__(self, lanes: list[_Lane]) -> None:
        self.lanes, self.device = lanes, lanes[0].inputs.device
        self.graph, self.made = capture(self._compute, self.device)

    def _compute(self) -> list[list[Tensor | None]]:
        """The gradients of each lane: in a captured graph, where they are after every launch."""
        origin, made = torch.cuda.current_stream(self.device), []
        for lane in self.lanes:
            lane.stream.wait_stream(origin)
            with torch.cuda.stream(lane.stream):
                made.append(lane.compute())
        for lane in self.lanes:
            origin.wait_stream(lane.stream)
        return made

    def __call__(self, points: Tensor, buffers: Tensor, ranks: list[int], inputs: Tensor, targets: Tensor) -> Tensor:
        for lane, rank, x, y in zip(self.lanes, ranks, inputs, targets, strict=True):
            lane.single.point.copy_(points[rank])
            lane.single.buffers.copy_(buffers[rank])
            lane.inputs.copy_(x)
            lane.targets.copy_(y)
        self.graph.replay()
        for lane, made, rank in zip(self.lanes, self.made, ranks, strict=True):
            lane.single.write(made, points[rank])
            buffers[rank].copy_(lane.single.buffers)
        return torch.stack([lane.loss for lane in self.lanes])


class Batched:
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


class BatchedGraphs:
    """Many workers by one launch of a captured CUDA graph; one graph per size, in powers of two.

    The dozens of small kernels of a batch take the GPU less time than it takes to launch them.
    """

    def __init__(self, batched: Batched, most: int) -> None:
        self.batched, self.most = batched, most
        self.static: tuple[Tensor, ...] = ()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # They never run at the same time, and what they return is copied at once: they may share their memory.
        self.pool = torch.cuda.graph_pool_handle()
        self.possible = True

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        count = len(ranks)
        size = min(self.most, 1 << (count - 1).bit_length())
        if self.possible and size not in self.graphs:
            self.possible = self._capture(size, points, buffers, inputs, targets)
        if not self.possible:
            return self.batched(points, buffers, ranks, index, inputs, targets)
        some, own, x, y = (tensor[:count] for tensor in self.static)
        torch.index_select(points, 0, index, out=some)
        torch.index_select(buffers, 0, index, out=own)
        x.copy_(inputs)
        y.copy_(targets)
        graph, losses = self.graphs[size]
        graph.replay()
        points.index_copy_(0, index, some)
        buffers.index_copy_(0, index, own)
        return losses[:count].clone()

    def _capture(self, size: int, points: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> bool:
        """Capture the graph of this size; False if the model cannot be captured."""
        if not self.static:
            shapes = [(self.most, *tensor.shape[1:]) for tensor in (points, buffers, inputs, targets)]
            self.static = tuple(
                tensor.new_zeros(shape)
                for tensor, shape in zip((points, buffers, inputs, targets), shapes, strict=True)
            )
        rows = [tensor[:size] for tensor in self.static]
        try:
            self.graphs[size] = capture(lambda: self.batched.compute(*rows), points.device, self.pool)
        except RuntimeError:  # it copies from the CPU, or looks at a number
            return False
        return True


@contextlib.contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN time its algorithms once and keep the fastest: a gradient's shapes are always the same."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def capture(compute: Callable[[], T], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """``compute`` as a CUDA graph, and what it returns: tensors that hold it after every launch."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            compute()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = compute()
    return graph, result
