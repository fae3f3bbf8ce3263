"""Losses, gradients and scores of many workers' models at once.

Three ways to do it (``ways``, ``graphs``), with the same result up to rounding:

``batched``   one pass for all (``vmap``, or a chain of layers), on CUDA by a captured graph: for small models;
``graph``     on CUDA, a captured graph of a few models side by side, into whose parameters workers' rows are copied:
              for models that do not batch well but whose launches cost more than their arithmetic (ResNet-18);
``loop``      one worker after the other, plainly: for large models on CPU, and for models that the others cannot take.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from gossamer.errors import InputError
from gossamer.flat import Flat, usable
from gossamer.seeds import stream
from gossamer.tasks import Batches, Task
from gossamer.tasks.scores import cross_entropies, cross_entropy
from gossamer.virtual.compute.batched_mlp import BatchedMLP
from gossamer.virtual.compute.blocks import WIDE_BYTES
from gossamer.virtual.compute.cuda_graphs import NUM_COPIES, BatchedGraphBackend, GraphBackend
from gossamer.virtual.compute.gradient_backends import (
    Autocast,
    BatchedBackend,
    FunctionalModel,
    GradientBackend,
    SequentialBackend,
)

GRADIENT_BACKENDS = ("auto", "batched", "graph", "loop")
PRECISIONS = ("float32", "bfloat16")

SMALL_MODEL = 2_000_000
"""Models with fewer parameters than this, and no convolution, are batched; larger ones only if asked for, and without
graphs."""

CHUNK_BYTES = 256 << 20
"""How much of parameters, gradients and inputs one batch of workers may take."""


def choose_backend(model: nn.Module, num_parameters: int, device: torch.device) -> str:
    """The way that suits the model; from its kind and size alone, so that every machine chooses alike."""
    convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    limit = SMALL_MODEL // 20 if convolutions else SMALL_MODEL
    if num_parameters < limit:
        return "batched"
    return "graph" if device.type == "cuda" else "loop"


class Evaluator:
    """Evaluates the model of a task at rows of parameters, each with its worker's data and buffers."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        batches: Sequence[Batches],
        *,
        seed: int,
        device: torch.device,
        way: str = "auto",
        precision: str = "float32",
    ) -> None:
        self.task, self.batches, self.seed, self.device = task, batches, seed, device
        self.model = model.to(device).train()
        self._stand_ins, self._chain = FunctionalModel(model), BatchedMLP.of(model)
        self.flat = Flat.of_parameters(model)
        self.buffer_flat = Flat.of_buffers(model)
        self.way = choose_backend(model, self.flat.size, device) if way == "auto" else way
        narrow = precision == "bfloat16"
        if narrow and self.way == "batched" and self.buffer_flat.size:
            # Under vmap torch's batch norm wants its running statistics in the precision of its input.
            if way == "batched":
                raise InputError(
                    "--precision bfloat16 and batch norm do not batch: take --gradient-backend auto, graph or loop"
                )
            self.way = "graph" if device.type == "cuda" else "loop"
        # Nothing is cached: a captured graph casts its weights anew at every replay.
        self.autocast: Autocast = partial(
            torch.autocast, device.type, torch.bfloat16, enabled=narrow, cache_enabled=False
        )
        if self.way == "graph" and device.type != "cuda":
            raise InputError("--gradient-backend graph needs a CUDA device: take batched or loop, or --device cuda")
        self.train = tuple(part.to(device) for part in task.train)
        self.test = tuple(part.to(device) for part in task.test)
        named = dict(model.named_buffers())
        start = self.buffer_flat.pack(
            named, torch.empty(self.buffer_flat.size, dtype=self.buffer_flat.dtype, device=device)
        )
        self.buffers = start.repeat(len(batches), 1)
        """Floating-point buffers, one row per worker: kept local, averaged for evaluation."""
        self.counters = {name: buffer for name, buffer in named.items() if not buffer.is_floating_point()}
        self.chunk = self._chunk()
        """How many workers are evaluated together."""
        self._compute: GradientBackend | None = None

    def _chunk(self) -> int:
        if self.way != "batched":
            return NUM_COPIES if self.way == "graph" else 1
        sample = self.train[0][0].numel() * 8 * (self.batches[0].batch if self.batches else 1)
        row = self.flat.size * torch.finfo(self.flat.dtype).bits // 8
        return max(1, CHUNK_BYTES // (3 * row + sample))

    def start(self, out: Tensor) -> Tensor:
        """The model's own parameters as one vector. They lie there from now on: it takes no memory of its own."""
        self.flat.pack(dict(self.model.named_parameters()), out)
        self.lay_over(out)
        return out

    def lay_over(self, vector: Tensor) -> None:
        """Let the model's parameters be views of ``vector``."""
        named = dict(self.model.named_parameters())
        for name, view in self.flat.views(vector).items():
            named[name].data = view

    def gradients(self, points: Tensor, ranks: list[int], steps: list[int]) -> Tensor:
        """Replace rows ``ranks`` of ``points`` by the gradients there, for mini-batch ``steps``; returns the losses."""
        if self._compute is None:
            self._compute = self._make_way(points)
        # Not blocking: the CPU goes on while the GPU is busy. The copy has left the array when the call returns.
        index = torch.from_numpy(np.array(ranks)).to(self.device, non_blocking=True)
        losses = []
        for at in range(0, len(ranks), self.chunk):
            some = slice(at, at + self.chunk)
            inputs, targets = self._mini_batches(ranks[some], steps[some])
            if not self.model.training:
                self.model.train()
            losses.append(self._compute(points, self.buffers, ranks[some], index[some], inputs, targets))
        return torch.cat(losses)

    def _make_way(self, points: Tensor) -> GradientBackend:
        if self.way == "batched":
            batched = BatchedBackend(self._losses, self.flat, self.buffer_flat)
            if self.device.type != "cuda" or self.flat.size >= SMALL_MODEL:
                # A graph needs memory of its own for the points; so large a model is not launched often.
                return batched
            return BatchedGraphBackend(batched, min(self.chunk, len(points)), self.device)
        make = partial(
            SequentialBackend, self.task, self.model, self.flat, self.buffer_flat, self.device, self.autocast
        )
        plain = partial(make, in_place=points[0].nbytes >= WIDE_BYTES and all(map(usable, points)))
        return GraphBackend(make, otherwise=plain) if self.way == "graph" else plain()

    def _losses(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> Tensor:
        outputs = self._outputs_of_many(parameters, buffers, inputs)
        if self.task.loss is cross_entropy:
            return cross_entropies(outputs, targets)
        return vmap(self.task.loss, randomness="different")(outputs, targets)

    def _outputs_of_many(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        if self._chain is None:
            outputs: Tensor = vmap(self._outputs, randomness="different")(parameters, buffers, inputs)
            return outputs
        if self.task.prepare is not None:
            inputs = vmap(self.task.prepare, randomness="different")(inputs)
        with self.autocast():
            return self._chain(parameters, inputs).to(self.flat.dtype)

    def _outputs(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Tensor:
        if self.task.prepare is not None:
            inputs = self.task.prepare(inputs)
        named = parameters | buffers | {name: counter.clone() for name, counter in self.counters.items()}
        with self.autocast():
            return self._stand_ins(named, inputs).to(self.flat.dtype)

    def _mini_batches(self, ranks: list[int], steps: list[int]) -> tuple[Tensor, Tensor]:
        samples = np.concatenate([self.batches[rank].look_at(step) for rank, step in zip(ranks, steps, strict=True)])
        samples = samples.reshape(len(ranks), -1)
        # Not blocking: the CPU goes on while the GPU is busy. The copy has left the array when the call returns.
        index = torch.from_numpy(samples).to(self.device, non_blocking=True)
        inputs, targets = (part.index_select(0, index.flatten()).unflatten(0, index.shape) for part in self.train)
        if self.task.augment is not None:
            augmented = [
                self.task.augment(batch, stream(self.seed, "augment", rank, step))
                for batch, rank, step in zip(inputs, ranks, steps, strict=True)
            ]
            inputs = torch.stack(augmented)
        return inputs, targets

    @torch.no_grad()
    def scores(self, rows: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor | None]:
        """Loss and accuracy of each row's model on the test set."""
        self.model.eval()
        chunk = max(1, CHUNK_BYTES // (4 * rows.shape[1] * rows.element_size() + 1))
        workers = chunk if self.way == "batched" else 1
        losses, corrects = [], []
        for at in range(0, len(rows), workers):
            loss, correct = self._scores(rows[at : at + workers], buffers[at : at + workers])
            losses.append(loss)
            corrects.append(correct)
        return torch.cat(losses), torch.cat(corrects) if self.task.correct is not None else None

    def _scores(self, rows: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self.test
        samples = len(inputs)
        # Activations are about as large as the inputs times a hundred, per worker.
        piece = max(1, min(samples, CHUNK_BYTES // (400 * max(1, inputs[0].numel()) * len(rows))))
        loss = torch.zeros(len(rows), device=rows.device, dtype=torch.float64)
        correct = torch.zeros_like(loss)
        for at in range(0, samples, piece):
            x, y = inputs[at : at + piece], targets[at : at + piece]
            if self.way == "batched":
                named = self.flat.views(rows), self.buffer_flat.views(buffers)
                outputs = vmap(self._outputs, in_dims=(0, 0, None))(*named, x)
            else:
                models = zip(rows, buffers, strict=True)
                views = self.flat.views, self.buffer_flat.views
                outputs = torch.stack([self._outputs(views[0](row), views[1](own), x) for row, own in models])
            share = len(x) / samples
            loss += share * vmap(self.task.loss, in_dims=(0, None))(outputs, y)
            if self.task.correct is not None:
                correct += share * vmap(self.task.correct, in_dims=(0, None))(outputs, y)
        return loss, correct
