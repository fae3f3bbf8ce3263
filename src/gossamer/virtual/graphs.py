"""Gradients by captured CUDA graphs: what takes a GPU less time than it takes to launch is launched in one go."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from gossamer.tasks.norms import fused
from gossamer.virtual.ways import Batched, Single, Way

LANES = 4
"""Workers whose gradients a captured graph computes side by side."""

HELD_BYTES = 1 << 22
"""Of gradients that a captured graph holds before they replace the point."""

T = TypeVar("T")


class Graphs:
    """Captures CUDA graphs that never run at the same time, and whose results are copied at once.

    They may share their memory, and all are captured on one stream and in one thread: cuBLAS keeps tens of megabytes
    for each of either.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """``compute`` as a CUDA graph, and what it returns: tensors that hold it after every launch."""
        with torch.autograd.set_multithreading_enabled(False):
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    compute()
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                result = compute()
        return graph, result


class SingleGraph:
    """A few workers side by side, each with a model of its own, by one launch of a captured CUDA graph.

    One worker's kernels leave much of a large GPU idle; those of several share it.
    """

    def __init__(self, make: Callable[[], Single], otherwise: Callable[[], Way]) -> None:
        self.make, self.otherwise = make, otherwise
        self.captured: tuple[_SideBySide, _SideBySide] | None = None
        self.plain: Way | None = None
        """In the place of graphs, if the model cannot be captured."""

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        if self.captured is None and self.plain is None:
            self._capture(inputs[0], targets[0])
        if self.plain is not None:
            return self.plain(points, buffers, ranks, index, inputs, targets)
        assert self.captured is not None
        together, alone = self.captured
        if len(ranks) == LANES:
            return together(points, buffers, ranks, inputs, targets)
        each = [
            alone(points, buffers, [rank], x[None], y[None]) for rank, x, y in zip(ranks, inputs, targets, strict=True)
        ]
        return torch.cat(each)

    def _capture(self, inputs: Tensor, targets: Tensor) -> None:
        """Make the graph for all lanes and that for a worker alone, or what takes their place."""
        for held_at_most in (HELD_BYTES, math.inf):
            lanes = [_Lane(self.make(), inputs, targets, held_at_most) for _ in range(LANES)]
            graphs = Graphs(inputs.device)
            try:
                self.captured = _SideBySide(lanes, graphs), _SideBySide(lanes[:1], graphs)
                return
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):  # it copies from the CPU, or looks at a number
                    break
            # Something was needed once more after its gradient had replaced it.
        self.plain = self.otherwise()


class _Lane:
    """One of the models side by side, and what is copied into it.

    A gradient replaces the point, part by part, while ``backward`` is still busy with the others: never is there more
    than a piece of it beside the point.
    """

    def __init__(self, single: Single, inputs: Tensor, targets: Tensor, held_at_most: float) -> None:
        self.single, self.stream = single, torch.cuda.Stream(inputs.device)
        self.inputs, self.targets = inputs.clone(), targets.clone()
        self.loss = torch.zeros((), dtype=single.point.dtype, device=inputs.device)
        self.held, self.held_at_most = 0, held_at_most
        for _, parameter in single.fetched:
            parameter.register_post_accumulate_grad_hook(self._made)

    def compute(self) -> None:
        """Replace the point by the gradient."""
        self.held = 0
        with fused():
            self.loss.copy_(self.single.compute(self.inputs, self.targets))
        self.single.write(self.single.point)

    def _made(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.held += parameter.grad.nbytes
        if self.held > self.held_at_most:
            self.single.write_early()
            self.held = 0


class _SideBySide:
    """A captured graph of one or several lanes."""

    def __init__(self, lanes: list[_Lane], graphs: Graphs) -> None:
        self.lanes, self.device = lanes, lanes[0].inputs.device
        self.graph, _ = graphs.capture(self._compute)

    def _compute(self) -> None:
        origin = torch.cuda.current_stream(self.device)
        for lane in self.lanes:
            lane.stream.wait_stream(origin)
            with torch.cuda.stream(lane.stream):
                lane.compute()
        for lane in self.lanes:
            origin.wait_stream(lane.stream)

    def __call__(self, points: Tensor, buffers: Tensor, ranks: list[int], inputs: Tensor, targets: Tensor) -> Tensor:
        for lane, rank, x, y in zip(self.lanes, ranks, inputs, targets, strict=True):
            lane.single.point.copy_(points[rank])
            lane.single.buffers.copy_(buffers[rank])
            lane.inputs.copy_(x)
            lane.targets.copy_(y)
        self.graph.replay()
        for lane, rank in zip(self.lanes, ranks, strict=True):
            points[rank].copy_(lane.single.point)
            buffers[rank].copy_(lane.single.buffers)
        return torch.stack([lane.loss for lane in self.lanes])


class BatchedGraphs:
    """Many workers by one launch of a captured CUDA graph; one graph per size, in powers of two.

    The dozens of small kernels of a batch take the GPU less time than it takes to launch them.
    """

    def __init__(self, batched: Batched, most: int, device: torch.device) -> None:
        self.batched, self.most = batched, most
        self.static: tuple[Tensor, ...] = ()
        self.replays: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.graphs = Graphs(device)
        self.possible = True

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        count = len(ranks)
        size = min(self.most, 1 << (count - 1).bit_length())
        if self.possible and size not in self.replays:
            self.possible = self._capture(size, points, buffers, inputs, targets)
        if not self.possible:
            return self.batched(points, buffers, ranks, index, inputs, targets)
        some, own, x, y = (tensor[:count] for tensor in self.static)
        torch.index_select(points, 0, index, out=some)
        torch.index_select(buffers, 0, index, out=own)
        x.copy_(inputs)
        y.copy_(targets)
        graph, losses = self.replays[size]
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
            self.replays[size] = self.graphs.capture(lambda: self.batched.compute(*rows))
        except RuntimeError:  # it copies from the CPU, or looks at a number
            return False
        return True
