"""Gradient backends that replay captured CUDA graphs.

The kernels of a small model, or of a small batch, take the GPU less time than the CPU needs to launch them. A captured
graph launches all of them at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from gossamer.virtual.compute.comparison_cache import ComparisonCache
from gossamer.virtual.compute.gradient_backends import BatchedBackend, GradientBackend, SequentialBackend

NUM_COPIES = 4
"""Workers whose gradients one captured graph computes concurrently, each on its own copy of the model."""

NUM_SMALL_COPIES, SMALL_MODEL = 8, 1_000_000
"""The same for models with fewer parameters than this: one worker's kernels leave more of the GPU idle."""


def num_copies(num_parameters: int) -> int:
    return NUM_SMALL_COPIES if num_parameters < SMALL_MODEL else NUM_COPIES


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


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
    """Evaluates up to ``max_workers`` workers by one replay of a captured graph, each on its own copy of the model.

    The kernels of one worker leave much of a large GPU idle; those of several share it. A model that cannot be captured
    is evaluated by the fallback.
    """

    def __init__(
        self,
        make_copy: Callable[[], SequentialBackend],
        make_fallback: Callable[[], GradientBackend],
        max_workers: int,
        cache: ComparisonCache,
        key: Hashable,
    ) -> None:
        """``key``: what the graphs depend on, besides the number of copies and the shape of a mini-batch."""
        self.make_copy, self.make_fallback, self.max_workers = make_copy, make_fallback, max_workers
        self.cache, self.key = cache, key
        self.backend: GradientBackend | None = None

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        if self.backend is None:
            self.backend = self._capture(inputs, targets)
        return self.backend(points, buffers, ranks, index, inputs, targets)

    def _capture(self, inputs: Tensor, targets: Tensor) -> GradientBackend:
        def capture() -> CapturedCopies:
            copies = CapturedCopies(self.make_copy, self.max_workers, inputs[0], targets[0])
            copies.capture(len(inputs))
            return copies

        try:
            return self.cache.graphs((self.key, self.max_workers, *_layout(inputs, targets)), capture)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the model copies from the CPU, or reads a number of a tensor
            reason = str(error).partition("\n")[0]
        warnings.warn(f"no CUDA graph of this model, which will take longer: {reason}", stacklevel=2)
        return self.make_fallback()


class CapturedCopies:
    """Copies of the model and captured graphs of the first 1, 2, 4 … of them, or of all.

    A batch of workers takes the smallest graph that is large enough. What its other copies compute is not used.
    """

    def __init__(
        self,
        make_copy: Callable[[], SequentialBackend],
        max_workers: int,
        inputs: Tensor,
        targets: Tensor,
        make_capture: Callable[[torch.device], GraphCapture] | None = None,
    ) -> None:
        """``inputs`` and ``targets``: one mini-batch, for its shape. ``make_capture`` replaces ``GraphCapture``."""
        self.models = [make_copy() for _ in range(max_workers)]
        self.points = [model.point for model in self.models]
        self.buffers = [model.buffers for model in self.models]
        self.inputs, self.targets = (torch.stack([part] * max_workers) for part in (inputs, targets))
        self.losses = torch.zeros(max_workers, dtype=self.points[0].dtype, device=inputs.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """By the number of copies."""
        self.graph_capture = (make_capture or GraphCapture)(inputs.device)
        self.draws_random_numbers = False

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        count = len(ranks)
        graph = self.capture(count)
        self.inputs[:count].copy_(inputs)
        self.targets[:count].copy_(targets)
        rows = [(self.points[:count], _rows(points, ranks))]
        if buffers.numel():
            rows.append((self.buffers[:count], _rows(buffers, ranks)))
        # One launch for all rows, however long.
        for static, theirs in rows:
            torch._foreach_copy_(static, theirs)
        graph.replay()
        for static, theirs in rows:
            torch._foreach_copy_(theirs, static)
        return self.losses[:count].clone()

    def capture(self, count: int) -> torch.cuda.CUDAGraph:
        """Return the graph for ``count`` workers. Capture it if there is none yet, which overwrites all copies."""
        size = min(len(self.models), 1 << (count - 1).bit_length())
        if size not in self.graphs:
            computations = [partial(self._compute, number) for number in range(size)]
            run_all = partial(self.graph_capture.run_concurrently, computations)
            before = _random_state(self.inputs.device)
            with warnings.catch_warnings():
                # The compiler's advice to round more coarsely, and what is outdated in torch itself.
                warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
                warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
                self.graphs[size], _ = self.graph_capture.capture(run_all)
            self.draws_random_numbers |= _random_state(self.inputs.device) != before
        return self.graphs[size]

    def _compute(self, number: int) -> None:
        """Replace the point of one copy by the gradient there."""
        model = self.models[number]
        self.losses[number].copy_(model.compute(self.inputs[number], self.targets[number]))
        model.write_gradient(model.point)


def _layout(*mini_batches: Tensor) -> list[Hashable]:
    """Return what a graph depends on of one mini-batch per worker."""
    return [(tuple(part.shape[1:]), part.dtype) for part in mini_batches]


def _random_state(device: torch.device) -> tuple[bytes, ...]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(state.numpy().tobytes() for state in states)


def _rows(matrix: Tensor, ranks: list[int]) -> list[Tensor]:
    rows = matrix.unbind()
    return [rows[rank] for rank in ranks]


class BatchedGraphBackend:
    """Evaluates many workers by one replay of a captured graph. There is one graph per batch size, a power of two."""

    def __init__(
        self, batched: BatchedBackend, max_workers: int, device: torch.device, cache: ComparisonCache, key: Hashable
    ) -> None:
        """``key``: what the graphs depend on, besides ``max_workers`` and the shape of a mini-batch."""
        self.batched, self.max_workers, self.device = batched, max_workers, device
        self.cache, self.key = cache, key
        self.captured: CapturedBatches | None = None
        self.capturable = True

    def __call__(
        self, points: Tensor, buffers: Tensor, ranks: list[int], index: Tensor, inputs: Tensor, targets: Tensor
    ) -> Tensor:
        if self.captured is None:
            key = (self.key, self.max_workers, *_layout(inputs, targets))
            make = partial(CapturedBatches, self.max_workers, self.device, points, buffers, inputs, targets)
            self.captured = self.cache.graphs(key, make)
        count = len(ranks)
        size = min(self.max_workers, 1 << (count - 1).bit_length())
        if self.capturable and size not in self.captured.graphs:
            self.capturable = self.captured.capture(self.batched, size)
        if not self.capturable:
            return self.batched(points, buffers, ranks, index, inputs, targets)
        point_block, buffer_block, x, y = (tensor[:count] for tensor in self.captured.static)
        torch.index_select(points, 0, index, out=point_block)
        torch.index_select(buffers, 0, index, out=buffer_block)
        x.copy_(inputs)
        y.copy_(targets)
        losses = self.captured.replay(size)
        points.index_copy_(0, index, point_block)
        buffers.index_copy_(0, index, buffer_block)
        return losses[:count].clone()


class CapturedBatches:
    """Captured graphs of batches of workers, by batch size, and the tensors that they read and write."""

    def __init__(self, max_workers: int, device: torch.device, *examples: Tensor) -> None:
        """``examples``: points, buffers, inputs and targets of some workers, for their shapes."""
        self.static = tuple(tensor.new_zeros((max_workers, *tensor.shape[1:])) for tensor in examples)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, BatchedBackend]] = {}
        """The graph, its losses, and the backend that was captured: the graph reads the constants of its model."""
        self.graph_capture = GraphCapture(device)
        self.device = device
        self.draws_random_numbers = False

    def capture(self, batched: BatchedBackend, size: int) -> bool:
        """Capture the graph of this size. Return False if the model cannot be captured."""
        rows = [tensor[:size] for tensor in self.static]
        before = _random_state(self.device)
        try:
            graph, losses = self.graph_capture.capture(partial(batched.compute, *rows))
        except RuntimeError:  # the model copies from the CPU, or reads a number of a tensor
            return False
        self.graphs[size] = (graph, losses, batched)
        self.draws_random_numbers |= _random_state(self.device) != before
        return True

    def replay(self, size: int) -> Tensor:
        """Run the graph of this size on what ``static`` holds. Return its losses, which the next replay overwrites."""
        graph, losses, _ = self.graphs[size]
        graph.replay()
        return losses
