"""Optimizer steps of many workers at once.

SGD, Adam, AdamW, AccumAdam and AccumAdamW work element by element, so the steps of several workers are one step on
several rows of a matrix, each with its own learning rate and step count. Any other torch optimizer gets one instance
per worker, whose parameters are views of the worker's row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gossamer.errors import InputError
from gossamer.optim import AccumAdam, AccumAdamW
from gossamer.vectors import memory
from gossamer.vectors.flat import Flat, Part
from gossamer.virtual.compute.matrix import GATHER_BYTES, Matrix, scatter
from gossamer.virtual.compute.tape import Batch

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class WorkerOptimizers(Protocol):
    def apply(self, batch: Batch) -> None:
        """Take one step for each of the workers ``batch.rows``, with the learning rates ``batch.arguments``."""

    def reset(self, rank: int) -> None:
        """Clear the optimizer state of this worker."""

    def copy_state(self, rank: int, peer: int) -> None:
        """Give this worker the optimizer state of ``peer``."""

    def read_state(self, rank: int, name: str) -> Tensor:
        """Return a copy of the state that torch's optimizer has under ``name``, flat; zeros before the first step."""

    def write_state(self, rank: int, name: str, value: Tensor) -> None:
        """Replace that state, unless the worker has taken no step yet."""


def batched_optimizer(template: torch.optim.Optimizer, x: Matrix, g: Matrix) -> WorkerOptimizers | None:
    """Return the batched form of ``template`` for parameters ``x`` and gradients ``g``, or None if it has none."""
    if len(template.param_groups) != 1:
        return None
    settings = template.param_groups[0]
    if settings.get("maximize") or settings.get("differentiable") or settings.get("amsgrad"):
        return None
    kind = type(template)
    if kind is torch.optim.SGD and not settings["dampening"]:
        return BatchedSGD(kind.__name__, settings, x, g)
    if kind in (torch.optim.Adam, torch.optim.AdamW, AccumAdam, AccumAdamW):
        decoupled = kind in (torch.optim.AdamW, AccumAdamW) or bool(settings.get("decoupled_weight_decay"))
        return BatchedAdam(kind.__name__, settings, x, g, decoupled)
    return None


class BatchedOptimizer:
    """The state of all workers: vectors by torch's name for them, one row per worker, and the number of steps taken."""

    def __init__(self, name: str, num_workers: int, vectors: dict[str, Sequence[Tensor]]) -> None:
        self.name, self.vectors = name, vectors
        self.steps = [0] * num_workers

    def reset(self, rank: int) -> None:
        for rows in self.vectors.values():
            rows[rank].zero_()
        self.steps[rank] = 0

    def copy_state(self, rank: int, peer: int) -> None:
        for rows in self.vectors.values():
            rows[rank].copy_(rows[peer])
        self.steps[rank] = self.steps[peer]

    def read_state(self, rank: int, name: str) -> Tensor:
        return self._rows(name)[rank].clone()

    def write_state(self, rank: int, name: str, value: Tensor) -> None:
        rows = self._rows(name)
        if self.steps[rank]:
            rows[rank].copy_(value)

    def _rows(self, name: str) -> Sequence[Tensor]:
        if name not in self.vectors:
            raise no_such_state(self.name, name, self.vectors)
        return self.vectors[name]


def no_such_state(optimizer: str, name: str, known: Iterable[str]) -> InputError:
    expected = ", ".join(sorted(known)) or "none: it has no state with these settings"
    return InputError(f"{optimizer} keeps no vectors {name!r}: expected {expected}")


class BatchedSGD(BatchedOptimizer):
    def __init__(self, name: str, settings: dict[str, Any], x: Matrix, g: Matrix) -> None:
        self.x, self.g, self.settings = list(x.data), list(g.data), settings
        self.momentum = list(memory.zeros_like(x.data)) if settings["momentum"] else None
        super().__init__(name, len(x.data), {} if self.momentum is None else {"momentum_buffer": self.momentum})

    def apply(self, batch: Batch) -> None:
        ranks: dict[float, list[int]] = {}
        for rank in batch.rows:
            self.steps[rank] += 1
        for rank, lr in zip(batch.rows, batch.arguments, strict=True):
            ranks.setdefault(lr, []).append(rank)
        for lr, same_lr in ranks.items():
            # SGD(fused=True) calls this too: one pass over memory, one call for all rows.
            torch._fused_sgd_(
                [self.x[rank] for rank in same_lr],
                [self.g[rank] for rank in same_lr],
                [self.momentum[rank] for rank in same_lr] if self.momentum is not None else [],
                weight_decay=self.settings["weight_decay"],
                momentum=self.settings["momentum"],
                lr=lr,
                dampening=0.0,
                nesterov=self.settings["nesterov"],
                maximize=False,
                is_first_step=False,
            )


class BatchedAdam(BatchedOptimizer):
    """AccumAdam with its period. Adam is AccumAdam with period 1, without the accumulator."""

    def __init__(self, name: str, settings: dict[str, Any], x: Matrix, g: Matrix, decoupled: bool) -> None:
        self.x, self.g, self.settings, self.decoupled = x, g, settings, decoupled
        self.period = int(settings.get("period", 1))
        self.first, self.second = memory.zeros_like(x.data), memory.zeros_like(x.data)
        self.accumulated = memory.zeros_like(x.data) if self.period > 1 else None
        vectors: dict[str, Sequence[Tensor]] = {"exp_avg": list(self.first), "exp_avg_sq": list(self.second)}
        if self.accumulated is not None:
            vectors["accumulated"] = list(self.accumulated)
        super().__init__(name, len(x.data), vectors)

    def apply(self, batch: Batch) -> None:
        for rank in batch.rows:
            self.steps[rank] += 1
        beta1, beta2 = self.settings["betas"]
        decay, eps = self.settings["weight_decay"], self.settings["eps"]
        for rows, lr in _row_blocks(batch):
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

    def _accumulate(self, rows: _RowBlock, gradient: Tensor, steps: list[int]) -> None:
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


class _RowBlock:
    """Some rows of the matrices, read and written as one block.

    A single row, or all rows, are read without a copy, so in-place operations on the block change the rows themselves.
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

    def where(self, wanted: list[bool]) -> _RowBlock:
        if all(wanted):
            return self
        ranks = [rank for rank, want in zip(self.ranks, wanted, strict=True) if want]
        return _RowBlock(
            ranks, torch.tensor(ranks, dtype=torch.long).to(self.like.device, non_blocking=True), self.like
        )

    def column(self, values: list[float]) -> Tensor | float:
        """Return one number per row, in a shape that multiplies or divides a block."""
        if values.count(values[0]) == len(values):
            return values[0]
        return torch.tensor(values, dtype=self.like.dtype).to(self.like.device, non_blocking=True)[:, None]

    def descend(self, data: Tensor, direction: Tensor, rates: list[float]) -> None:
        """Subtract ``rates · direction`` from the rows of ``data``."""
        rate = self.column(rates)
        if isinstance(rate, Tensor):
            direction, rate = direction * rate, 1.0
        if len(self.ranks) == 1 or self.index is None:
            self.read(data).sub_(direction, alpha=rate)
        else:
            data.index_add_(0, self.index, direction, alpha=-rate)


def _row_blocks(batch: Batch) -> Iterable[tuple[_RowBlock, list[float]]]:
    """Yield the rows of the batch in blocks of at most ``GATHER_BYTES``, with their learning rates."""
    data = batch.target.data
    if batch.covers_all and not batch.target.wide:
        yield _RowBlock(batch.rows, None, data), batch.arguments
        return
    index = torch.tensor(batch.rows, dtype=torch.long).to(data.device, non_blocking=True)
    count = 1 if batch.target.wide else max(1, GATHER_BYTES // max(1, data[0].nbytes))
    for start in range(0, len(batch.rows), count):
        chunk = slice(start, start + count)
        yield _RowBlock(batch.rows[chunk], index[chunk], data), batch.arguments[chunk]


class PerWorkerOptimizers:
    """One torch optimizer per worker."""

    def __init__(self, make_optimizer: MakeOptimizer, flat: Flat, x: Matrix, g: Matrix) -> None:
        self.make_optimizer, self.flat, self.x, self.g = make_optimizer, flat, x, g
        self.parameters: list[list[nn.Parameter]] = []
        """The tensors of each worker, in the order of ``flat.parts``."""
        for rank in range(len(x.data)):
            self.parameters.append([nn.Parameter(part.view(x.data[rank])) for part in flat.parts])
            for parameter, part in zip(self.parameters[rank], flat.parts, strict=True):
                parameter.grad = part.view(g.data[rank])
        self.optimizers = [make_optimizer(parameters) for parameters in self.parameters]
        self.steps = [0] * len(x.data)

    def reset(self, rank: int) -> None:
        self.optimizers[rank] = self.make_optimizer(self.parameters[rank])
        self.steps[rank] = 0

    def copy_state(self, rank: int, peer: int) -> None:
        self.reset(rank)
        # A copy, because load_state_dict keeps the tensors it is given.
        self.optimizers[rank].load_state_dict(copy.deepcopy(self.optimizers[peer].state_dict()))
        self.steps[rank] = self.steps[peer]

    def read_state(self, rank: int, name: str) -> Tensor:
        flat = torch.zeros_like(self.x.data[rank])
        for part, state in self._states(rank, name):
            part.view(flat).copy_(state)
        return flat

    def write_state(self, rank: int, name: str, value: Tensor) -> None:
        for part, state in self._states(rank, name):
            state.copy_(part.view(value))

    def _states(self, rank: int, name: str) -> list[tuple[Part, Tensor]]:
        """Return the state ``name`` of every parameter that has it, with the parameter's position."""
        optimizer, found, known = self.optimizers[rank], [], set()
        for parameter, part in zip(self.parameters[rank], self.flat.parts, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    known.add(key)
                    if key == name:
                        found.append((part, value))
        if self.steps[rank] and not found:
            raise no_such_state(type(optimizer).__name__, name, known)
        return found

    def apply(self, batch: Batch) -> None:
        for rank, lr in zip(batch.rows, batch.arguments, strict=True):
            optimizer = self.optimizers[rank]
            self.steps[rank] += 1
            largest = max(group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups)
            for group in optimizer.param_groups:
                # The schedule scales all groups; their learning rates keep their proportions.
                group["lr"] = lr * (group["initial_lr"] / largest if largest else 1.0)
            optimizer.step()
