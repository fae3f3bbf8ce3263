"""The replicas of all workers: parameters, gradients, method vectors, optimizer state, buffers, training losses.

Everything here is numbers; simulated time is the cluster's. Reading any of them flushes the tape.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gossamer.config import Run
from gossamer.seeds import stream
from gossamer.vectors import memory
from gossamer.virtual.compute.evaluator import Evaluator
from gossamer.virtual.compute.matrix import GATHER_BYTES, WIDE_BYTES, Matrix
from gossamer.virtual.compute.optimizers import PerWorkerOptimizers, WorkerOptimizers, batched_optimizer
from gossamer.virtual.compute.rows import Row
from gossamer.virtual.compute.tape import Batch, Tape
from gossamer.virtual.compute.tensor_like import dense


class Diverged(Exception):
    """The loss or the parameters of a worker are not finite."""

    def __init__(self, time: float, rank: int, step: int) -> None:
        super().__init__(f"diverged: the loss of worker {rank} was not finite at its step {step}, time {time:g}")
        self.time, self.rank, self.step = time, rank, step


class Replicas:
    def __init__(self, run: Run, evaluator: Evaluator) -> None:
        num_workers = run.config.workers
        self.evaluator = evaluator
        self.tape = Tape(num_workers, evaluator.flat.dtype, evaluator.device)
        self.parameters = self.tape.matrix(evaluator.flat.size)
        self.gradients = self.tape.matrix(evaluator.flat.size)
        if evaluator.device.type == "cpu":
            memory.retain_freed_blocks(self.parameters.data[0].nbytes)
        self._method_vectors: dict[str, Matrix] = {}
        self.offsets = (*(part.start for part in evaluator.flat.parts), evaluator.flat.size)
        named = dict(evaluator.model.named_parameters())
        self.template = run.make_optimizer([named[part.name] for part in evaluator.flat.parts])
        """An optimizer that only provides its settings."""
        base_lr = self.template.param_groups[0]["lr"]
        self.lr = cache(lambda step: base_lr * run.schedule(step))
        """Learning rate by step number."""
        self.optimizers: WorkerOptimizers = batched_optimizer(
            self.template, self.parameters, self.gradients
        ) or PerWorkerOptimizers(run.make_optimizer, evaluator.flat, self.parameters, self.gradients)
        self.tape.run_updates = self.optimizers.apply
        self.tape.run_gradients = self._run_gradients
        self.gradient_times: list[Any] = []
        """For every gradient since ``take_losses``: the worker, the number of its mini-batch, the simulated time. Flat,
        as programs are (``executor``)."""
        self._losses: list[tuple[list[int], list[int], Tensor]] = []
        """Ranks, numbers of mini-batches and losses of every batch of gradients since ``take_losses``."""
        common = evaluator.pack_model(self.parameters.data[0])
        for rank in range(num_workers):
            start = common
            if run.task.start is not None:
                start = torch.as_tensor(run.task.start(rank, stream(run.config.seed, "start", rank)))
            self.parameters.data[rank].copy_(start)

    def vector(self, name: str, size: int | None, rank: int) -> Row:
        """Return a worker's row of the method vectors called ``name``."""
        if name not in self._method_vectors:
            self._method_vectors[name] = self.tape.matrix(self.evaluator.flat.size if size is None else size)
        return Row(self.tape, self._method_vectors[name].slots[rank])

    def optimizer_setting(self, name: str, step: int) -> Any:
        if name == "lr":
            return self.lr(step)
        return self.template.param_groups[0][name]

    def read_optimizer_state(self, rank: int, name: str) -> Tensor:
        self.tape.flush()
        return self.optimizers.read_state(rank, name)

    def write_optimizer_state(self, rank: int, name: str, value: Any) -> None:
        self.tape.flush()
        self.optimizers.write_state(rank, name, dense(value))

    def copy_local_state(self, rank: int, peer: int, optimizer_state: bool) -> None:
        """Copy the buffers of ``peer`` to worker ``rank``, and its optimizer state or a fresh one."""
        self.tape.flush()
        self.evaluator.buffers[rank].copy_(self.evaluator.buffers[peer])
        if optimizer_state:
            self.optimizers.copy_state(rank, peer)
        else:
            self.optimizers.reset(rank)

    def _run_gradients(self, batch: Batch) -> None:
        losses = self.evaluator.gradients(batch.target.data, batch.rows, batch.arguments)
        self._losses.append((batch.rows, batch.arguments, losses))

    def take_losses(self) -> float | None:
        """Return the mean training loss since the last call. Raise ``Diverged`` if one of them is not finite."""
        self.tape.flush()
        batches, times = self._losses, self.gradient_times
        self._losses, self.gradient_times = [], []
        if not batches:
            return None
        losses = torch.cat([losses for _, _, losses in batches])
        bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        if bad:
            keys = [key for ranks, steps, _ in batches for key in zip(ranks, steps, strict=True)]
            when = {(rank, step): time for rank, step, time in zip(times[::3], times[1::3], times[2::3], strict=True)}
            raise Diverged(*min((when[keys[k]], *keys[k]) for k in bad))
        return float(losses.double().mean())

    def rows(self) -> Tensor:
        self.tape.flush()
        return self.parameters.data

    def first_nonfinite(self) -> int:
        return next(rank for rank, row in enumerate(self.rows()) if not bool(torch.isfinite(row).all()))

    def mean_model(self, ranks: list[int]) -> Tensor:
        data = self.rows()
        if len(ranks) == len(data):
            return data.mean(0)
        total = data[ranks[0]].clone()
        for rank in ranks[1:]:
            total += data[rank]
        return total / len(ranks)

    def mean_buffers(self, ranks: list[int]) -> Tensor:
        self.tape.flush()
        return self.evaluator.buffers[ranks].mean(0)

    def consensus(self, ranks: list[int]) -> float:
        """Return the consensus distance of these workers, sqrt(mean_i ‖x_i − x̄‖²)."""
        data = self.rows()
        # Relative to one of them, so that rows equal to the bit are at distance 0: their mean would be rounded.
        origin = data[ranks[0]]
        squares = torch.zeros((), dtype=torch.float64, device=data.device)
        shift = torch.zeros_like(origin)
        chunk = max(1, GATHER_BYTES // max(1, 2 * origin.nbytes)) if origin.nbytes < WIDE_BYTES else 1
        for start in range(0, len(ranks), chunk):
            difference = data[ranks[start : start + chunk]] - origin
            shift += difference.sum(0)
            squares += difference.square_().sum(dtype=torch.float64)
        mean_square = float(squares) / len(ranks) - float((shift / len(ranks)).square_().sum(dtype=torch.float64))
        return math.sqrt(max(0.0, mean_square)) if math.isfinite(mean_square) else math.inf
