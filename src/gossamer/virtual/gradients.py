"""Losses, gradients and scores of many workers' models at once.

Three ways to do it, with the same result up to rounding:

``batched``   one ``vmap`` over workers: the fastest for small models, on CPU and GPU;
``graph``     on CUDA, one captured graph into whose static parameters a worker's row is copied: for models that do not
              batch well but whose launches cost more than their arithmetic (ResNet-18);
``loop``      one worker after the other, plainly: for large models on CPU, and for models that the others cannot take.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from gossamer.errors import InputError
from gossamer.flat import Flat
from gossamer.seeds import stream
from gossamer.tasks import Batches, Task

WAYS = ("auto", "batched", "graph", "loop")

SMALL_MODEL = 2_000_000
"""Models with fewer parameters than this, and no convolution, are batched."""

CHUNK_BYTES = 256 << 20
"""How much of parameters, gradients and inputs one batch of workers may take."""


def choose_way(model: nn.Module, num_parameters: int, device: torch.device) -> str:
    """The way that suits the model; from its kind and size alone, so that every machine chooses alike."""
    convolutions = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    limit = SMALL_MODEL // 20 if convolutions else SMALL_MODEL
    if num_parameters < limit:
        return "batched"
    return "graph" if device.type == "cuda" else "loop"


class Evaluator:
    """Evaluates the model of a task at rows of parameters, each with its worker's data and buffers."""

    def __init__(
        self, task: Task, model: nn.Module, batches: Sequence[Batches], seed: int, device: torch.device, way: str
    ) -> None:
        self.task, self.model, self.batches, self.seed, self.device = task, model.to(device), batches, seed, device
        self.flat = Flat.of_parameters(model)
        self.buffer_flat = Flat.of_buffers(model)
        self.way = choose_way(model, self.flat.size, device) if way == "auto" else way
        if self.way == "graph" and device.type != "cuda":
            raise InputError("--gradients graph needs a CUDA device: take batched or loop, or --device cuda")
        self.train = tuple(part.to(device) for part in task.train)
        self.test = tuple(part.to(device) for part in task.test)
        named = dict(model.named_buffers())
        start = self.buffer_flat.pack(
            named, torch.empty(self.buffer_flat.size, dtype=self.buffer_flat.dtype, device=device)
        )
        self.buffers = start.repeat(len(batches), 1)
        """Floating-point buffers, one row per worker: kept local, averaged for evaluation."""
        self.counters = {name: buffer for name, buffer in named.items() if not buffer.is_floating_point()}
        self._captured: _Captured | None = None

    def start(self) -> Tensor:
        """The model's own parameters as one vector."""
        out = torch.empty(self.flat.size, dtype=self.flat.dtype, device=self.device)
        return self.flat.pack(dict(self.model.named_parameters()), out)

    def gradients(self, points: Tensor, ranks: list[int], steps: list[int]) -> Tensor:
        """Replace rows ``ranks`` of ``points`` by the gradients there, for mini-batch ``steps``; returns the losses."""
        chunk = self.chunk(points)
        losses = [
            self._chunk(points, ranks[at : at + chunk], steps[at : at + chunk]) for at in range(0, len(ranks), chunk)
        ]
        return torch.cat(losses)

    def chunk(self, points: Tensor) -> int:
        """How many workers are evaluated together."""
        if self.way != "batched":
            return 1
        sample = self.train[0][0].numel() * 8 * (self.batches[0].batch if self.batches else 1)
        return max(1, CHUNK_BYTES // (3 * points.shape[1] * points.element_size() + sample))

    def _chunk(self, points: Tensor, ranks: list[int], steps: list[int]) -> Tensor:
        inputs, targets = self._mini_batches(ranks, steps)
        self.model.train()
        if self.way == "batched":
            whole = ranks == list(range(len(points)))
            index = torch.as_tensor(ranks, device=self.device)
            rows = points if whole else points[index]
            buffers = self.buffers if whole else self.buffers[index]
            with torch.enable_grad():
                rows = rows.detach().requires_grad_()
                losses = vmap(self._loss, randomness="different")(rows, buffers, inputs, targets)
                (gradients,) = torch.autograd.grad(losses.sum(), rows)
            if whole:
                points.copy_(gradients)
            else:
                points.index_copy_(0, index, gradients)
                if self.buffer_flat.size:
                    self.buffers.index_copy_(0, index, buffers)
            return losses.detach()
        (rank,) = ranks
        if self.way == "graph" and self._captured is None:
            self._captured = _Captured(self, inputs[0], targets[0])
        run = self._captured if self._captured is not None else self._plain
        return run(points[rank], self.buffers[rank], inputs[0], targets[0])[None]

    def _plain(self, row: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            point = row.detach().clone().requires_grad_()
            loss = self._loss(point, buffers, inputs, targets)
            (gradient,) = torch.autograd.grad(loss, point)
        row.copy_(gradient)
        return loss.detach()

    def _loss(self, row: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(self._outputs(row, buffers, inputs), targets)

    def _outputs(self, row: Tensor, buffers: Tensor, inputs: Tensor) -> Tensor:
        if self.task.prepare is not None:
            inputs = self.task.prepare(inputs)
        # Batch norm writes its running statistics into these views, that is, into the worker's row of buffers.
        named = self.flat.views(row) | self.buffer_flat.views(buffers)
        named |= {name: counter.clone() for name, counter in self.counters.items()}
        return functional_call(self.model, named, (inputs,))

    def _mini_batches(self, ranks: list[int], steps: list[int]) -> tuple[Tensor, Tensor]:
        samples = np.stack([self.batches[rank].take(step) for rank, step in zip(ranks, steps, strict=True)])
        index = torch.from_numpy(samples).to(self.device)
        inputs, targets = (part[index.flatten()].unflatten(0, index.shape) for part in self.train)
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
                outputs = vmap(self._outputs, in_dims=(0, 0, None))(rows, buffers, x)
            else:
                outputs = torch.stack([self._outputs(row, own, x) for row, own in zip(rows, buffers, strict=True)])
            share = len(x) / samples
            loss += share * vmap(self.task.loss, in_dims=(0, None))(outputs, y)
            if self.task.correct is not None:
                correct += share * vmap(self.task.correct, in_dims=(0, None))(outputs, y)
        return loss, correct


class _Captured:
    """One gradient as a captured CUDA graph: parameters, buffers and data are copied into its static inputs."""

    def __init__(self, evaluator: Evaluator, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs.clone(), targets.clone()
        self.buffers = evaluator.buffers[0].clone()
        self.model = evaluator.model
        self.flat, device = evaluator.flat, evaluator.device
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.point = torch.zeros(self.flat.size, dtype=self.flat.dtype, device=device)
        self.gradient = torch.zeros_like(self.point)
        named = self.flat.views(self.point)
        leaves = {name: view.detach().requires_grad_() for name, view in named.items()}
        if any(leaf.dtype != self.flat.dtype for leaf in leaves.values()):
            raise InputError("--gradients graph needs parameters of one dtype: take loop")
        buffer_views = evaluator.buffer_flat.views(self.buffers)
        counters = {name: counter.clone() for name, counter in evaluator.counters.items()}

        def once() -> Tensor:
            data = evaluator.task.prepare(self.inputs) if evaluator.task.prepare is not None else self.inputs
            output = functional_call(self.model, leaves | buffer_views | counters, (data,))
            loss = evaluator.task.loss(output, self.targets)
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            for part, gradient in zip(self.flat.parts, gradients, strict=True):
                part.view(self.gradient).copy_(gradient)
            return loss.detach()

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), torch.enable_grad():
            for _ in range(3):
                once()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.enable_grad(), torch.cuda.graph(self.graph):
            self.loss = once()

    def __call__(self, row: Tensor, buffers: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        self.point.copy_(row)
        self.buffers.copy_(buffers)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.graph.replay()
        row.copy_(self.gradient)
        buffers.copy_(self.buffers)
        return self.loss.clone()
