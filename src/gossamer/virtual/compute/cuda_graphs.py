"""Gradient backends that replay captured CUDA graphs.

The kernels of a small model, or of a small batch, take the GPU less time than the CPU needs to launch them. A captured
graph launches all of them at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gossamer.virtual.compute.gradient_backends import BatchedBackend, GradientBackend, SequentialBackend

NUM_COPIES = 4
"""Workers whose gradients one captured graph computes concurrently, each on its own copy of the model."""

T = TypeVar("T")


class GraphCapture:
    """Captures CUDA graphs that share one memory pool.

    They may share it because they never run at the same time and their results are copied right after a replay. All are
    captured on one stream and in one thread, because cuBLAS keeps tens of megabytes for each stream and thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.side_streams: list[torch.cuda.Stream] = []
        self.pool = torch.cuda.graph_pool_handle()

    def run_concurrently(self, computations: Sequence[Callable[[], None]]) -> None:
        """Run each computation on a stream of its own."""
        while len(self.side_streams) < len(computations):
            self.side_streams.append(torch.cuda.Stream(self.device))
        origin, streams = torch.cuda.current_stream(self.device), self.side_streams[: len(computations)]
        for stream, compute in zip(streams, computations, strict=True):
            stream.wait_stream(origin)
            with torch.cuda.stream(stream):
                compute()
        for stream in streams:
            origin.wait_stream(stream)

    def capture(self, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture ``compute``. Return the graph and the result of ``compute``: tensors that every replay fills."""
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
    """Evaluates up to ``NUM_COPIES`` workers by one replay of a captured graph, each on its own copy of the model.

    The kernels of one worker leave much of a large GPU idle; those of several share it. A model that cannot be captured
    is evaluated by the fallback.
    """

    def __init__(
        self, make_copy: Callable[[], SequentialBackend], make_fallback: Callable[[], GradientBackend]
    ) -> None:
        self.make_copy, self.make_fallback = make_copy, make_fallback
        self.backend: GradientBackend | None = None

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        if self.backend is None:
            self.backend = self._capture(inputs[0], targets[0])
        return self.backend(points, buffers, ranks, index, inputs, targets)

    def _capture(self, inputs: Tensor, targets: Tensor) -> GradientBackend:
        try:
            return _CapturedCopies(self.make_copy, inputs, targets)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the model copies from the CPU, or reads a number of a tensor
            reason = str(error).partition("\n")[0]
        warnings.warn(f"no CUDA graph of this model, which will take longer: {reason}", stacklevel=2)
        return self.make_fallback()


class _CapturedCopies:
    """Two captured graphs: one of all copies of the model, one of the first copy alone, for smaller batches."""

    def __init__(self, make_copy: Callable[[], SequentialBackend], inputs: Tensor, targets: Tensor) -> None:
        self.copies = [_ModelCopy(make_copy(), inputs, targets) for _ in range(NUM_COPIES)]
        capture = GraphCapture(inputs.device)
        computations = [copy.compute for copy in self.copies]
        self.graph_of_all, _ = capture.capture(lambda: capture.run_concurrently(computations))
        self.graph_of_one, _ = capture.capture(lambda: capture.run_concurrently(computations[:1]))

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        if len(ranks) == NUM_COPIES:
            return self._replay(self.graph_of_all, points, buffers, ranks, inputs, targets)
        losses = [
            self._replay(self.graph_of_one, points, buffers, [rank], x[None], y[None])
            for rank, x, y in zip(ranks, inputs, targets, strict=True)
        ]
        return torch.cat(losses)

    def _replay(
        self,
        graph: torch.cuda.CUDAGraph,
        points: Tensor,
        buffers: Tensor,
        ranks: list[int],
        inputs: Tensor,
        targets: Tensor,
    ) -> Tensor:
        copies = self.copies[: len(ranks)]
        for copy, rank, x, y in zip(copies, ranks, inputs, targets, strict=True):
            copy.load(points[rank], buffers[rank], x, y)
        graph.replay()
        for copy, rank in zip(copies, ranks, strict=True):
            points[rank].copy_(copy.model.point)
            buffers[rank].copy_(copy.model.buffers)
        return torch.stack([copy.loss for copy in copies])


class _ModelCopy:
    """A copy of the model with the static tensors that its graph reads and writes."""

    def __init__(self, model: SequentialBackend, inputs: Tensor, targets: Tensor) -> None:
        self.model, self.inputs, self.targets = model, inputs.clone(), targets.clone()
        self.loss = torch.zeros((), dtype=model.point.dtype, device=inputs.device)

    def load(self, point: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> None:
        self.model.point.copy_(point)
        self.model.buffers.copy_(buffers)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)

    def compute(self) -> None:
        """Replace the point by the gradient there."""
        self.loss.copy_(self.model.compute(self.inputs, self.targets))
        self.model.write_gradient(self.model.point)


class BatchedGraphBackend:
    """Evaluates many workers by one replay of a captured graph. There is one graph per batch size, a power of two."""

    def __init__(self, batched: BatchedBackend, max_workers: int, device: torch.device) -> None:
        self.batched, self.max_workers = batched, max_workers
        self.static: tuple[Tensor, ...] = ()
        """Points, buffers, inputs and targets that the graphs read and write."""
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """The graph and its losses by batch size."""
        self.capture = GraphCapture(device)
        self.capturable = True

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        count = len(ranks)
        size = min(self.max_workers, 1 << (count - 1).bit_length())
        if self.capturable and size not in self.graphs:
            self.capturable = self._capture(size, points, buffers, inputs, targets)
        if not self.capturable:
            return self.batched(points, buffers, ranks, index, inputs, targets)
        point_block, buffer_block, x, y = (tensor[:count] for tensor in self.static)
        torch.index_select(points, 0, index, out=point_block)
        torch.index_select(buffers, 0, index, out=buffer_block)
        x.copy_(inputs)
        y.copy_(targets)
        graph, losses = self.graphs[size]
        graph.replay()
        points.index_copy_(0, index, point_block)
        buffers.index_copy_(0, index, buffer_block)
        return losses[:count].clone()

    def _capture(self, size: int, points: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> bool:
        """Capture the graph of this size. Return False if the model cannot be captured."""
        if not self.static:
            self.static = tuple(
                tensor.new_zeros((self.max_workers, *tensor.shape[1:])) for tensor in (points, buffers, inputs, targets)
            )
        rows = [tensor[:size] for tensor in self.static]
        try:
            self.graphs[size] = self.capture.capture(lambda: self.batched.compute(*rows))
        except RuntimeError:  # the model copies from the CPU, or reads a number of a tensor
            return False
        return True
