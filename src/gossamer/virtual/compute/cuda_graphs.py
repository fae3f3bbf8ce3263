"""Gradients by captured CUDA graphs: what takes a GPU less time than it takes to launch is launched in one go."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gossamer.tasks.fused_resnet import fuse
from gossamer.virtual.compute.executor import triton_works
from gossamer.virtual.compute.gradient_backends import BatchedBackend, GradientBackend, SequentialBackend

NUM_COPIES = 4
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
        self.side_streams: list[torch.cuda.Stream] = []
        self.pool = torch.cuda.graph_pool_handle()

    def side_by_side(self, computes: Sequence[Callable[[], None]]) -> None:
        """All of these, each on a stream of its own."""
        while len(self.side_streams) < len(computes):
            self.side_streams.append(torch.cuda.Stream(self.device))
        origin, streams = torch.cuda.current_stream(self.device), self.side_streams[: len(computes)]
        for stream, compute in zip(streams, computes, strict=True):
            stream.wait_stream(origin)
            with torch.cuda.stream(stream):
                compute()
        for stream in streams:
            origin.wait_stream(stream)

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


class GraphBackend:
    """A few workers side by side, each with a model of its own, by one launch of a captured CUDA graph.

    One worker's kernels leave much of a large GPU idle; those of several share it. A model that cannot be captured goes
    another way.
    """

    def __init__(self, make: Callable[[], SequentialBackend], otherwise: Callable[[], GradientBackend]) -> None:
        self.make, self.otherwise = make, otherwise
        self.way: GradientBackend | None = None

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        if self.way is None:
            self.way = self._capture(points[ranks[0]], buffers[ranks[0]], inputs[0], targets[0])
        return self.way(points, buffers, ranks, index, inputs, targets)

    def _capture(self, point: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> GradientBackend:
        try:
            return _ModelCopies(self.make, point, buffers, inputs, targets)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # it copies from the CPU, or looks at a number
            reason = str(error).partition("\n")[0]
        warnings.warn(f"no CUDA graph of this model, which will take longer: {reason}", stacklevel=2)
        return self.otherwise()


class _ModelCopies:
    """Two captured graphs: of all lanes, and of one alone, for when there are not enough workers for all."""

    def __init__(
        self, make: Callable[[], SequentialBackend], point: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor
    ) -> None:
        first = ModelCopy(make(), inputs, targets)
        first.settle(point, buffers)
        lanes = [first, *(ModelCopy(make(), inputs, targets, first.held_at_most) for _ in range(1, NUM_COPIES))]
        graphs = Graphs(inputs.device)
        self.together, self.alone = _CapturedCopies(lanes, graphs), _CapturedCopies(lanes[:1], graphs)

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        if len(ranks) == NUM_COPIES:
            return self.together(points, buffers, ranks, inputs, targets)
        each = [
            self.alone(points, buffers, [rank], x[None], y[None])
            for rank, x, y in zip(ranks, inputs, targets, strict=True)
        ]
        return torch.cat(each)


class ModelCopy:
    """One of the models side by side, and what is copied into it.

    A gradient replaces the point, part by part, while ``backward`` is still busy with the others: as a rule there is no
    more than a piece of it beside the point.
    """

    def __init__(
        self, single: SequentialBackend, inputs: Tensor, targets: Tensor, held_at_most: float = math.inf
    ) -> None:
        self.single, self.inputs, self.targets = single, inputs.clone(), targets.clone()
        self.loss = torch.zeros((), dtype=single.point.dtype, device=inputs.device)
        self.held, self.held_at_most = 0, held_at_most
        """Bytes of gradients."""
        for _, parameter in single.fetched:
            parameter.register_post_accumulate_grad_hook(self._made)
        if triton_works(inputs.device):
            fuse(single.model)

    def settle(self, point: Tensor, buffers: Tensor) -> None:
        """See whether gradients may replace the point as they come.

        Not in a model that computes something with a weight after its gradient is there. Torch notices that for what
        it has saved itself, but there are other ways to keep a weight.
        """
        with torch.autograd.set_multithreading_enabled(False):
            expected = self._gradient(point, buffers)
            self.held_at_most = HELD_BYTES
            try:
                error = float((self._gradient(point, buffers) - expected).norm())
            except RuntimeError as needed:
                if "modified by an inplace operation" not in str(needed):
                    raise
                error = math.inf
        if not error <= 1e-3 * float(expected.norm()):
            self.held_at_most = math.inf

    def _gradient(self, point: Tensor, buffers: Tensor) -> Tensor:
        self.load(point, buffers, self.inputs, self.targets)
        self.compute()
        return self.single.point.clone()

    def load(self, point: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> None:
        self.single.point.copy_(point)
        self.single.buffers.copy_(buffers)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)

    def compute(self) -> None:
        """Replace the point by the gradient."""
        self.held = 0
        self.loss.copy_(self.single.compute(self.inputs, self.targets))
        self.single.write(self.single.point)

    def _made(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.held += parameter.grad.nbytes
        if self.held > self.held_at_most:
            self.single.write_early()
            self.held = 0


class _CapturedCopies:
    """A captured graph of one or several lanes."""

    def __init__(self, lanes: list[ModelCopy], graphs: Graphs) -> None:
        self.lanes = lanes
        self.graph, _ = graphs.capture(lambda: graphs.side_by_side([lane.compute for lane in lanes]))

    def __call__(self, points: Tensor, buffers: Tensor, ranks: list[int], inputs: Tensor, targets: Tensor) -> Tensor:
        for lane, rank, x, y in zip(self.lanes, ranks, inputs, targets, strict=True):
            lane.load(points[rank], buffers[rank], x, y)
        self.graph.replay()
        for lane, rank in zip(self.lanes, ranks, strict=True):
            points[rank].copy_(lane.single.point)
            buffers[rank].copy_(lane.single.buffers)
        return torch.stack([lane.loss for lane in self.lanes])


class BatchedGraphBackend:
    """Many workers by one launch of a captured CUDA graph; one graph per size, in powers of two.

    The dozens of small kernels of a batch take the GPU less time than it takes to launch them.
    """

    def __init__(self, batched: BatchedBackend, most: int, device: torch.device) -> None:
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
