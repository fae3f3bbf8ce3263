"""Optimizer steps of many workers at once.

SGD, Adam, AdamW, AccumAdam and AccumAdamW treat every element alone, so the steps of several workers are one step on
several rows of a matrix, each with its own learning rate and step count. Any other torch optimizer gets one instance
per worker, over parameters that are views of the worker's row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossamer import memory
from gossamer.flat import Flat
from gossamer.optim import AccumAdam, AccumAdamW
from gossamer.virtual.compute.blocks import GATHER_BYTES, scatter
from gossamer.virtual.compute.tape import Batch, Matrix

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class WorkerOptimizers(Protocol):
    """The optimizers of all workers."""

    def apply(self, batch: Batch) -> None:
        """One step for each of the workers ``batch.rows``, with the learning rates ``batch.jobs``."""

    def reset(self, rank: int) -> None:
        """Forget what the optimizer of this worker remembers."""

    def take_over(self, rank: int, peer: int) -> None:
        """Let the optimizer of this worker remember what that of ``peer`` does."""


def batched(template: torch.optim.Optimizer, x: Matrix, g: Matrix) -> WorkerOptimizers | None:
    """The batched form of ``template``, or None if it has none with these settings."""
    if len(template.param_groups) != 1:
        return None
    settings = template.param_groups[0]
    if settings.get("maximize") or settings.get("differentiable") or settings.get("amsgrad"):
        return None
    kind = type(template)
    if kind is torch.optim.SGD and not settings["dampening"]:
        return _SGD(settings, x, g)
    if kind in (torch.optim.Adam, torch.optim.AdamW, AccumAdam, AccumAdamW):
        decoupled = kind in (torch.optim.AdamW, AccumAdamW) or bool(settings.get("decoupled_weight_decay"))
        return _Adam(settings, x, g, decoupled)
    return None


class _SGD:
    def __init__(self, settings: dict[str, Any], x: Matrix, g: Matrix) -> None:
        self.x, self.g, self.settings = list(x.data), list(g.data), settings
        self.momentum = list(memory.zeros_like(x.data)) if settings["momentum"] else None

    def reset(self, rank: int) -> None:
        if self.momentum is not None:
            self.momentum[rank].zero_()

    def take_over(self, rank: int, peer: int) -> None:
        if self.momentum is not None:
            self.momentum[rank].copy_(self.momentum[peer])

    def apply(self, batch: Batch) -> None:
        ranks: dict[float, list[int]] = {}
        for rank, lr in zip(batch.rows, batch.jobs, strict=True):
            ranks.setdefault(lr, []).append(rank)
        for lr, alike in ranks.items():
            # What SGD(fused=True) calls: one pass over memory, one call for all rows.
            torch._fused_sgd_(
                [self.x[rank] for rank in alike],
                [self.g[rank] for rank in alike],
                [self.momentum[rank] for rank in alike] if self.momentum is not None else [],
                weight_decay=self.settings["weight_decay"],
                momentum=self.settings["momentum"],
                lr=lr,
                dampening=0.0,
                nesterov=self.settings["nesterov"],
                maximize=False,
                is_first_step=False,
            )


class _Adam:
    """AccumAdam with its period; Adam is the period 1 of it, without the accumulator."""

    def __init__(self, settings: dict[str, Any], x: Matrix, g: Matrix, decoupled: bool) -> None:
        self.x, self.g, self.settings, self.decoupled = x, g, settings, decoupled
        self.period = int(settings.get("period", 1))
        self.first, self.second = memory.zeros_like(x.data), memory.zeros_like(x.data)
        self.accumulated = memory.zeros_like(x.data) if self.period > 1 else None
        self.steps = [0] * len(x.data)

    def reset(self, rank: int) -> None:
        self.first[rank].zero_()
        self.second[rank].zero_()
        if self.accumulated is not None:
            self.accumulated[rank].zero_()
        self.steps[rank] = 0

    def take_over(self, rank: int, peer: int) -> None:
        for matrix in (self.first, self.second, self.accumulated):
            if matrix is not None:
                matrix[rank].copy_(matrix[peer])
        self.steps[rank] = self.steps[peer]

    def apply(self, batch: Batch) -> None:
        for rank in batch.rows:
            self.steps[rank] += 1
        beta1, beta2 = self.settings["betas"]
        decay, eps = self.settings["weight_decay"], self.settings["eps"]
        for rows, lr in _pieces(batch):
            gradient = rows.read(self.g.data)
            if decay and self.decoupled:
                rows.write(self.x.data, rows.read(self.x.data).mul_(rows.column([1 - rate * decay for rate in lr])))
            elif decay:
                gradient = gradient.add(rows.read(self.x.data), alpha=decay)
            steps = [self.steps[rank] for rank in rows.ranks]
            periods = [-(-step // self.period) for step in steps]
            first, second = rows.read(self.first), rows.read(self.second)
            if self.accumulated is None:
                rows.write(self.first, first.mul_(beta1).add_(gradient, alpha=1 - beta1))
                rows.write(self.second, second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2))
                m, v = first, second
            else:
                m = torch.add(first, gradient, alpha=1 - beta1)
                v = torch.addcmul(second, gradient, gradient, value=1 - beta2)
            scale = v.sqrt().div_(rows.column([(1 - beta2**k) ** 0.5 for k in periods])).add_(eps)
            rows.descend(self.x.data, m / scale, [rate / (1 - beta1**k) for rate, k in zip(lr, periods, strict=True)])
            if self.accumulated is not None:
                self._accumulate(rows, gradient, steps)

    def _accumulate(self, rows: _Rows, gradient: Tensor, steps: list[int]) -> None:
        assert self.accumulated is not None
        beta1, beta2 = self.settings["betas"]
        rows.write(self.accumulated, rows.read(self.accumulated).add_(gradient, alpha=1 / self.period))
        ended = rows.where([step % self.period == 0 for step in steps])
        if not ended.ranks:
            return
        mean, first, second = ended.read(self.accumulated), ended.read(self.first), ended.read(self.second)
        ended.write(self.first, first.add_(mean, alpha=1 - beta1).mul_(beta1))
        ended.write(self.second, second.addcmul_(mean, mean, value=1 - beta2).mul_(beta2))
        ended.write(self.accumulated, mean.zero_())


class _Rows:
    """Some rows of the matrices: read as one block, written back as one.

    One row alone, or all of them, are read without a copy: what is done to the block is done to them.
    """

    def __init__(self, ranks: list[int], index: Tensor | None, like: Tensor) -> None:
        self.ranks, self.index, self.like = ranks, index, like

    def read(self, data: Tensor) -> Tensor:
        if len(self.ranks) == 1:
            return data[self.ranks[0]][None]
        return data if self.index is None else data.index_select(0, self.index)

    def write(self, data: Tensor, block: Tensor) -> None:
        if len(self.ranks) > 1 and self.index is not None:
            scatter(data, self.index, block)

    def where(self, wanted: list[bool]) -> _Rows:
        """Those of the rows that are wanted."""
        if all(wanted):
            return self
        ranks = [rank for rank, want in zip(self.ranks, wanted, strict=True) if want]
        return _Rows(ranks, torch.tensor(ranks, dtype=torch.long).to(self.like.device, non_blocking=True), self.like)

    def column(self, values: list[float]) -> Tensor | float:
        """One number per row, to multiply or divide a block with."""
        if values.count(values[0]) == len(values):
            return values[0]
        return torch.tensor(values, dtype=self.like.dtype).to(self.like.device, non_blocking=True)[:, None]

    def descend(self, data: Tensor, direction: Tensor, rates: list[float]) -> None:
        """``data[rows] −= rates · direction``."""
        rate = self.column(rates)
        if isinstance(rate, Tensor):
            direction, rate = direction * rate, 1.0
        if len(self.ranks) == 1 or self.index is None:
            self.read(data).sub_(direction, alpha=rate)
        else:
            data.index_add_(0, self.index, direction, alpha=-rate)


def _pieces(batch: Batch) -> Iterable[tuple[_Rows, list[float]]]:
    """The rows as one piece, or several where they are long; and their learning rates."""
    data = batch.target.data
    if batch.whole and not batch.target.wide:
        yield _Rows(batch.rows, None, data), batch.jobs
        return
    index = torch.tensor(batch.rows, dtype=torch.long).to(data.device, non_blocking=True)
    count = 1 if batch.target.wide else max(1, GATHER_BYTES // max(1, data[0].nbytes))
    for at in range(0, len(batch.rows), count):
        some = slice(at, at + count)
        yield _Rows(batch.rows[some], index[some], data), batch.jobs[some]


class PerWorkerOptimizers:
    """One torch optimizer per worker."""

    def __init__(self, make: MakeOptimizer, flat: Flat, x: Matrix, g: Matrix) -> None:
        self.make, self.flat, self.x, self.g = make, flat, x, g
        self.optimizers: list[torch.optim.Optimizer] = []
        for rank in range(len(x.data)):
            self.optimizers.append(self._fresh(rank))

    def _fresh(self, rank: int) -> torch.optim.Optimizer:
        parameters = [nn.Parameter(part.view(self.x.data[rank])) for part in self.flat.parts]
        for parameter, part in zip(parameters, self.flat.parts, strict=True):
            parameter.grad = part.view(self.g.data[rank])
        return self.make(parameters)

    def reset(self, rank: int) -> None:
        self.optimizers[rank] = self._fresh(rank)

    def take_over(self, rank: int, peer: int) -> None:
        self.reset(rank)
        # A copy: loading a state_dict keeps its tensors.
        self.optimizers[rank].load_state_dict(copy.deepcopy(self.optimizers[peer].state_dict()))

    def apply(self, batch: Batch) -> None:
        for rank, lr in zip(batch.rows, batch.jobs, strict=True):
            optimizer = self.optimizers[rank]
            largest = max(group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups)
            for group in optimizer.param_groups:
                # Groups keep their proportion to each other; the schedule scales them all.
                group["lr"] = lr * (group["initial_lr"] / largest if largest else 1.0)
            optimizer.step()
