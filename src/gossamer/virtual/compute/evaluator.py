"""Losses, gradients and test scores of many workers' models.

There are four gradient backends (``gradient_backends``, ``cuda_graphs``). They agree up to rounding:

``batched``   one pass for all workers (``vmap``, or ``batched_mlp``), on CUDA as a captured graph: for small models;
``graph``     on CUDA, a captured graph of a few copies of the model, into whose parameters workers' rows are copied:
              for models that do not batch well but whose launches cost more than their arithmetic (ResNet-18);
``compiled``  the same, of copies whose kernels ``torch.compile`` has fused: for runs that last minutes;
``loop``      one worker after the other: for large models on the CPU, and for models that the others cannot handle.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from gossamer.errors import InputError
from gossamer.seeds import stream
from gossamer.tasks import Batches, Task
from gossamer.tasks.task import cross_entropies, cross_entropy
from gossamer.vectors.flat import Flat, usable
from gossamer.virtual.compute.batched_mlp import BatchedMLP
from gossamer.virtual.compute.comparison_cache import ComparisonCache, model_key
from gossamer.virtual.compute.cuda_graphs import BatchedGraphBackend, GraphBackend, can_capture, num_copies
from gossamer.virtual.compute.gradient_backends import (
    Autocast,
    BatchedBackend,
    FunctionalModel,
    GradientBackend,
    SequentialBackend,
)
from gossamer.virtual.compute.matrix import WIDE_BYTES

MAX_BATCHED_PARAMETERS = 2_000_000
"""``auto`` batches models with fewer parameters, and a twentieth of that if they have convolutions. A larger model that
the user batches gets no CUDA graph."""

CHUNK_BYTES = 256 << 20
"""Upper limit for the parameters, gradients and inputs of the workers that are evaluated together."""

TEST_BYTES = {"cpu": CHUNK_BYTES, "cuda": 8 * CHUNK_BYTES}
"""Upper limit for the activations of a part of the test set; large on a GPU, where every launch costs time."""


def choose_backend(model: nn.Module, num_parameters: int, device: torch.device) -> str:
    """Choose the backend from the model's kind and size alone, so that every machine chooses the same."""
    has_convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    limit = MAX_BATCHED_PARAMETERS // 20 if has_convolutions else MAX_BATCHED_PARAMETERS
    if num_parameters < limit:
        return "batched"
    return "graph" if can_capture(device) else "loop"


class Evaluator:
    """Evaluates the model of a task at rows of parameters, each with the data and the buffers of its worker."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        batches: Sequence[Batches],
        *,
        seed: int,
        device: torch.device,
        backend: str = "auto",
        precision: str = "float32",
        cache: ComparisonCache | None = None,
    ) -> None:
        """``cache``: of the comparison, if the run is part of one."""
        self.task, self.batches, self.seed, self.device = task, batches, seed, device
        self.precision, self.cache = precision, cache or ComparisonCache()
        self.model = model.to(device).train()
        self._functional_model, self._mlp = FunctionalModel(model), BatchedMLP.of(model)
        self.flat = Flat.of_parameters(model)
        self.buffer_flat = Flat.of_buffers(model)
        self.backend = choose_backend(model, self.flat.size, device) if backend == "auto" else backend
        narrow = precision == "bfloat16"
        if self.backend in ("graph", "compiled") and not can_capture(device):
            raise InputError(
                f"--gradient-backend {self.backend} needs a CUDA device: take batched or loop, or --device cuda"
            )
        self.compiles = self.backend == "compiled"
        if self.compiles:
            self.backend = "graph"
        if narrow and self.backend == "batched" and self.buffer_flat.size:
            # Under vmap, torch's batch norm requires running statistics in the precision of its input.
            if backend == "batched":
                raise InputError(
                    "--precision bfloat16 and batch norm do not batch: "
                    "take --gradient-backend auto, graph, compiled or loop"
                )
            self.backend = "graph" if can_capture(device) else "loop"
        # Without a cache: a captured graph has to cast its weights at every replay.
        self.autocast: Autocast = partial(
            torch.autocast, device.type, torch.bfloat16, enabled=narrow, cache_enabled=False
        )
        self.train, self.test = self.cache.device_data(task, device)
        named = dict(model.named_buffers())
        start = self.buffer_flat.pack(
            named, torch.empty(self.buffer_flat.size, dtype=self.buffer_flat.dtype, device=device)
        )
        self.buffers = start.repeat(len(batches), 1)
        """Floating-point buffers, one row per worker: never exchanged, averaged for evaluation."""
        # Copies, because captured graphs read them, and the model's own are set at the end of a run.
        self.counters = {name: buffer.clone() for name, buffer in named.items() if not buffer.is_floating_point()}
        self.max_workers = self._max_workers()
        """How many workers one call of the backend evaluates."""
        self._compute: GradientBackend | None = None

    def _max_workers(self) -> int:
        if self.backend != "batched":
            return num_copies(self.flat.size) if self.backend == "graph" else 1
        sample = self.train[0][0].numel() * 8 * (self.batches[0].batch if self.batches else 1)
        row = self.flat.size * torch.finfo(self.flat.dtype).bits // 8
        return max(1, CHUNK_BYTES // (3 * row + sample))

    def pack_model(self, out: Tensor) -> Tensor:
        """Write the model's parameters into ``out`` and make them views of it, without memory of their own."""
        self.flat.pack(dict(self.model.named_parameters()), out)
        self.bind_model(out)
        return out

    def bind_model(self, vector: Tensor) -> None:
        named = dict(self.model.named_parameters())
        for name, view in self.flat.views(vector).items():
            named[name].data = view

    def gradients(self, points: Tensor, ranks: list[int], steps: list[int]) -> Tensor:
        """Replace rows ``ranks`` of ``points`` by their gradients, with mini-batches ``steps``; return the losses."""
        if self._compute is None:
            self._compute = self._make_backend(points)
        # Non-blocking, so that the CPU goes on while the GPU is busy. The call returns after the array was read.
        index = torch.from_numpy(np.array(ranks)).to(self.device, non_blocking=True)
        losses = []
        for start in range(0, len(ranks), self.max_workers):
            chunk = slice(start, start + self.max_workers)
            inputs, targets = self._mini_batches(ranks[chunk], steps[chunk])
            if not self.model.training:
                self.model.train()
            losses.append(self._compute(points, self.buffers, ranks[chunk], index[chunk], inputs, targets))
        return torch.cat(losses)

    def _make_backend(self, points: Tensor) -> GradientBackend:
        if self.backend == "batched":
            batched = BatchedBackend(self._losses, self.flat, self.buffer_flat)
            if not can_capture(self.device) or self.flat.size >= MAX_BATCHED_PARAMETERS:
                # A graph needs its own memory for the points, and a large model spends little time on launches.
                return batched
            max_workers = min(self.max_workers, len(points))
            return BatchedGraphBackend(batched, max_workers, self.device, self.cache, self._graph_key())
        make_copy = partial(
            SequentialBackend, self.task, self.model, self.flat, self.buffer_flat, self.device, self.autocast
        )
        make_loop = partial(make_copy, in_place=points[0].nbytes >= WIDE_BYTES and all(map(usable, points)))
        if self.backend == "graph":
            make_captured = partial(make_copy, compiles=self.compiles)
            max_workers = min(self.max_workers, len(points))
            return GraphBackend(make_captured, make_loop, max_workers, self.cache, self._graph_key())
        return make_loop()

    def _graph_key(self) -> Hashable:
        """Return what captured graphs depend on and all runs of one configuration have in common."""
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        replaced = [named[part.name] for part in (*self.flat.parts, *self.buffer_flat.parts)]
        kind = (self.backend, self.compiles, self.precision, self.device)
        return (self.task, *kind, model_key(self.model.train(), replaced, self.seed))

    def _losses(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> Tensor:
        outputs = self._batched_outputs(parameters, buffers, inputs)
        if self.task.loss is cross_entropy:
            return cross_entropies(outputs, targets)
        return vmap(self.task.loss, randomness="different")(outputs, targets)

    def _batched_outputs(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        if self._mlp is None:
            outputs: Tensor = vmap(self._outputs, randomness="different")(parameters, buffers, inputs)
            return outputs
        if self.task.prepare is not None:
            inputs = vmap(self.task.prepare, randomness="different")(inputs)
        with self.autocast():
            return self._mlp(parameters, inputs).to(self.flat.dtype)

    def _outputs(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        if self.task.prepare is not None:
            inputs = self.task.prepare(inputs)
        named = parameters | buffers | {name: counter.clone() for name, counter in self.counters.items()}
        with self.autocast():
            return self._functional_model(named, inputs).to(self.flat.dtype)

    def _mini_batches(self, ranks: list[int], steps: list[int]) -> tuple[Tensor, Tensor]:
        samples = np.concatenate([self.batches[rank].view(step) for rank, step in zip(ranks, steps, strict=True)])
        samples = samples.reshape(len(ranks), -1)
        # Non-blocking, so that the CPU goes on while the GPU is busy. The call returns after the array was read.
        index = torch.from_numpy(samples).to(self.device, non_blocking=True)
        inputs, targets = (part.index_select(0, index.flatten()).unflatten(0, index.shape) for part in self.train)
        if self.task.augment is not None:
            rngs = [stream(self.seed, "augment", rank, step) for rank, step in zip(ranks, steps, strict=True)]
            if self.task.augment_many is not None:
                inputs = self.task.augment_many(inputs, rngs)
            else:
                inputs = torch.stack(list(map(self.task.augment, inputs, rngs)))
        return inputs, targets

    @torch.no_grad()
    def scores(self, rows: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return loss and accuracy of each row's model on the test set."""
        self.model.eval()
        max_workers = max(1, CHUNK_BYTES // (4 * rows.shape[1] * rows.element_size() + 1))
        if self.backend != "batched":
            max_workers = 1
        losses, accuracies = [], []
        for start in range(0, len(rows), max_workers):
            loss, accuracy = self._scores(rows[start : start + max_workers], buffers[start : start + max_workers])
            losses.append(loss)
            accuracies.append(accuracy)
        return torch.cat(losses), torch.cat(accuracies) if self.task.correct is not None else None

    def _scores(self, rows: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self.test
        num_samples = len(inputs)
        # Activations take about a hundred times the memory of the inputs, per worker.
        limit = TEST_BYTES.get(self.device.type, CHUNK_BYTES)
        size = max(1, min(num_samples, limit // (400 * max(1, inputs[0].numel()) * len(rows))))
        loss = torch.zeros(len(rows), device=rows.device, dtype=torch.float64)
        accuracy = torch.zeros_like(loss)
        for start in range(0, num_samples, size):
            x, y = inputs[start : start + size], targets[start : start + size]
            if self.backend == "batched":
                named = self.flat.views(rows), self.buffer_flat.views(buffers)
                outputs = vmap(self._outputs, in_dims=(0, 0, None))(*named, x)
            else:
                models = [
                    (self.flat.views(row), self.buffer_flat.views(buffer))
                    for row, buffer in zip(rows, buffers, strict=True)
                ]
                outputs = torch.stack([self._outputs(*named, x) for named in models])
            share = len(x) / num_samples
            loss += share * vmap(self.task.loss, in_dims=(0, None))(outputs, y)
            if self.task.correct is not None:
                accuracy += share * vmap(self.task.correct, in_dims=(0, None))(outputs, y)
        return loss, accuracy
