"""Workers' vectors as rows of matrices, with operations that are recorded and run in batches.

Simulated time never depends on the numbers in a vector, so the cluster may run ahead of the arithmetic: an in-place
operation on a row (``add_``, ``sub_``, ``mul_``, ``lerp_``, ``copy_``), a mean, a gradient, an optimizer step is only
written down. When somebody looks at a row, everything written down is executed, and operations of one kind that do not
depend on each other are executed together: one kernel for many workers instead of one each.

Every row remembers the level at which it was last written and last read; an operation's level is one above those of
the rows it touches, so a level holds only operations that commute. Gradients start a new *wave* of levels: everything
cheap that can run before them does, and they meet in batches as large as the dependencies allow.

A row is not a tensor but passes for one: any other torch function or operator first executes what is pending and then
works on the real row, at the usual speed of one worker at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

WAVE = 1 << 20
"""Levels between two waves of gradients."""

WIDE_BYTES = 1 << 20
"""Rows at least this long are worked on one by one, in place: gathering them would cost more than it saves."""

PENDING_LIMIT = 1 << 16
"""Operations written down before they are executed whether somebody looks or not."""

COPY, ADD, SCALE, LERP, MEAN, GRADIENT, UPDATE = range(7)


class Matrix:
    """Vectors of one kind, one row per worker, and the levels of each row."""

    def __init__(self, key: int, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.key = key
        self.data = torch.zeros(num_rows, width, dtype=dtype, device=device)
        self.written = [0] * num_rows
        self.read = [0] * num_rows

    @property
    def wide(self) -> bool:
        return self.data.shape[1] * self.data.element_size() >= WIDE_BYTES


class Row:
    """One row of a matrix: stands for a flat tensor."""

    __slots__ = ("index", "matrix", "own", "tape")

    def __init__(self, tape: Tape, matrix: Matrix, index: int) -> None:
        self.tape, self.matrix, self.index = tape, matrix, index
        self.own: Tensor | None = None

    def tensor(self) -> Tensor:
        """The real row, once everything pending has been executed."""
        self.tape.flush()
        return self.matrix.data[self.index]

    def copy_(self, other: Any) -> Row:
        if not self.tape.combine(COPY, self, other, 0.0):
            self.tensor().copy_(dense(other))
        return self

    def add_(self, other: Any, *, alpha: float = 1.0) -> Row:
        if not self.tape.combine(ADD, self, other, alpha):
            self.tensor().add_(dense(other), alpha=alpha)
        return self

    def sub_(self, other: Any, *, alpha: float = 1.0) -> Row:
        return self.add_(other, alpha=-alpha)

    def lerp_(self, other: Any, weight: float) -> Row:
        if not self.tape.combine(LERP, self, other, weight):
            self.tensor().lerp_(dense(other), weight)
        return self

    def mul_(self, factor: Any) -> Row:
        if isinstance(factor, (int, float)):
            self.tape.scale(self, factor)
        else:
            self.tensor().mul_(dense(factor))
        return self

    def clone(self) -> Row:
        return self.tape.temporary(self.matrix.data.shape[1]).copy_(self)

    def numel(self) -> int:
        return self.matrix.data.shape[1]

    def element_size(self) -> int:
        return self.matrix.data.element_size()

    def __len__(self) -> int:
        return self.matrix.data.shape[1]

    def __getitem__(self, item: Any) -> Tensor:
        return self.tensor()[item]

    def __setitem__(self, item: Any, value: Any) -> None:
        self.tensor()[item] = dense(value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*map(_dense_inside, args), **{k: _dense_inside(v) for k, v in (kwargs or {}).items()})


def _forward_operator(name: str) -> Callable[..., Any]:
    def operator(self: Row, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*map(dense, others))

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "pow", "matmul", "abs", "float"):
    setattr(Row, f"__{_name}__", _forward_operator(f"__{_name}__"))


class Temporary(Row):
    """A row borrowed from a pool, given back when nobody holds it any more.

    Once somebody looks at it as a tensor it becomes one of its own, since views of it may outlive the loan.
    """

    __slots__ = ()

    def tensor(self) -> Tensor:
        if self.own is None:
            self.own = super().tensor().clone()
        return self.own

    def __del__(self) -> None:
        self.tape.give_back(self.matrix, self.index)


def dense(value: Any) -> Any:
    """The real tensor behind ``value`` if it is a row, else ``value``."""
    return value.tensor() if isinstance(value, Row) else value


def _dense_inside(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dense_inside, value))
    return dense(value)


class Tape:
    """Operations written down, and how they are executed."""

    def __init__(self, num_workers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_workers, self.dtype, self.device = num_workers, dtype, device
        self.run_gradients: Callable[[Matrix, list[tuple[int, Any]]], None] | None = None
        self.run_updates: Callable[[list[int], Tensor, list[float]], None] | None = None
        self._matrices = 0
        self._pools: dict[int, tuple[Matrix, deque[int]]] = {}
        self._pending: dict[tuple[int, int, int, int], tuple[int, Matrix, Matrix, list[Any]]] = {}
        self._num_pending = 0
        self._touched: list[Matrix] = []

    def matrix(self, width: int, num_rows: int | None = None) -> Matrix:
        """A new matrix of zeros, one row per worker."""
        made = Matrix(
            self._matrices, self.num_workers if num_rows is None else num_rows, width, self.dtype, self.device
        )
        self._matrices += 1
        self._touched.append(made)
        return made

    def temporary(self, width: int) -> Temporary:
        """A row to keep something in for a while; its content is undefined."""
        if width not in self._pools:
            self._pools[width] = (self.matrix(width), deque(range(self.num_workers)))
        pool, free = self._pools[width]
        if not free:
            self.flush()
            size = len(pool.data)
            pool.data = torch.cat([pool.data, torch.empty_like(pool.data)])
            pool.written += [0] * size
            pool.read += [0] * size
            free.extend(range(size, 2 * size))
        return Temporary(self, pool, free.popleft())

    def give_back(self, matrix: Matrix, index: int) -> None:
        self._pools[matrix.data.shape[1]][1].append(index)

    def combine(self, kind: int, target: Row, other: Any, number: float) -> bool:
        """Write down ``target ← combination of target and other``; False if it cannot be left for later."""
        if not isinstance(other, Row) or other.own is not None or target.own is not None:
            return False
        y, i, v, j = target.matrix, target.index, other.matrix, other.index
        if v is y and i == j:
            if kind == ADD:
                self.scale(target, 1.0 + number)
            return True
        level = max(y.written[i], y.read[i], v.written[j]) + 1
        y.written[i] = level
        if v.read[j] < level:
            v.read[j] = level
        self._note(level, kind, y, v, (i, j, number))
        return True

    def scale(self, target: Row, factor: float) -> None:
        """Write down ``target ← factor · target``."""
        if target.own is not None:
            target.tensor().mul_(factor)
            return
        y, i = target.matrix, target.index
        level = max(y.written[i], y.read[i]) + 1
        y.written[i] = level
        self._note(level, SCALE, y, y, (i, i, factor))

    def mean(self, rows: list[Any]) -> Any:
        """The mean of ``rows``: later, if they are rows of one matrix, else at once."""
        first = rows[0]
        if len(rows) == 1:
            return first
        if not isinstance(first, Row) or any(row.own is not None or row.matrix is not first.matrix for row in rows):
            total = dense(first).clone()
            for row in rows[1:]:
                total += dense(row)
            return total.div_(len(rows))
        out = self.temporary(len(first))
        v = first.matrix
        level = max(out.matrix.written[out.index], out.matrix.read[out.index])
        level = max(level, *(v.written[row.index] for row in rows)) + 1
        out.matrix.written[out.index] = level
        for row in rows:
            if v.read[row.index] < level:
                v.read[row.index] = level
        self._note(level, MEAN, out.matrix, v, (out.index, [row.index for row in rows]))
        return out

    def gradient(self, row: Row, job: Any) -> None:
        """Write down that ``row`` holds a point now and shall hold the gradient there."""
        g, i = row.matrix, row.index
        level = (max(g.written[i], g.read[i]) // WAVE + 1) * WAVE
        g.written[i] = level
        self._note(level, GRADIENT, g, g, (i, job))

    def update(self, row: Row, gradient: Row, lr: float) -> None:
        """Write down one optimizer step on ``row`` with ``gradient``."""
        x, i, g = row.matrix, row.index, gradient.matrix
        level = max(x.written[i], x.read[i], g.written[i]) + 1
        x.written[i] = level
        g.read[i] = max(g.read[i], level)
        self._note(level, UPDATE, x, g, (i, lr))

    def _note(self, level: int, kind: int, y: Matrix, v: Matrix, entry: Any) -> None:
        key = (level, kind, y.key, v.key)
        found = self._pending.get(key)
        if found is None:
            self._pending[key] = (kind, y, v, [entry])
        else:
            found[3].append(entry)
        self._num_pending += 1
        if self._num_pending >= PENDING_LIMIT:
            self.flush()

    def flush(self) -> None:
        """Execute everything written down."""
        if not self._pending:
            return
        pending = [self._pending[key] for key in sorted(self._pending)]
        self._pending, self._num_pending = {}, 0
        for matrix in self._touched:
            size = len(matrix.written)
            matrix.written, matrix.read = [0] * size, [0] * size
        batched = [p for p in pending if p[0] <= LERP and not p[1].wide and len(p[3]) > 2]
        numbers = self._transfer(batched)
        for kind, y, v, entries in pending:
            if kind == GRADIENT:
                assert self.run_gradients is not None
                self.run_gradients(y, entries)
            elif kind == UPDATE:
                assert self.run_updates is not None
                ranks = [rank for rank, _ in entries]
                self.run_updates(ranks, self.index(ranks), [lr for _, lr in entries])
            elif kind == MEAN:
                for out, members in entries:
                    _mean(y.data[out], v.data, members)
            elif id(entries) in numbers:
                _run_batch(kind, y, v, entries, *numbers[id(entries)])
            else:
                for i, j, number in entries:
                    _run_one(kind, y.data[i], v.data[j], number)

    def index(self, ranks: list[int]) -> Tensor:
        """Row numbers on the device."""
        return torch.as_tensor(ranks, device=self.device)

    def _transfer(
        self, batched: list[tuple[int, Matrix, Matrix, list[Any]]]
    ) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
        """The row numbers and coefficients of all batches, brought to the device in one go."""
        if not batched:
            return {}
        columns = [np.array(entries, dtype=np.float64) for *_, entries in batched]
        stacked = np.concatenate(columns)
        rows = torch.from_numpy(stacked[:, :2].astype(np.int64).T.copy()).to(self.device)
        coefficients = torch.from_numpy(stacked[:, 2]).to(self.device, self.dtype)
        numbers, at = {}, 0
        for (*_, entries), column in zip(batched, columns, strict=True):
            end = at + len(column)
            numbers[id(entries)] = (rows[0, at:end], rows[1, at:end], coefficients[at:end])
            at = end
        return numbers


def _mean(out: Tensor, data: Tensor, members: list[int]) -> None:
    if len(members) == len(data) and members == list(range(len(data))):
        torch.mean(data, 0, out=out)
        return
    torch.add(data[members[0]], data[members[1]], out=out)
    for member in members[2:]:
        out.add_(data[member])
    out.div_(len(members))


def _run_one(kind: int, y: Tensor, v: Tensor, number: float) -> None:
    if kind == COPY:
        y.copy_(v)
    elif kind == ADD:
        y.add_(v, alpha=number)
    elif kind == SCALE:
        y.mul_(number)
    else:
        y.lerp_(v, number)


def _run_batch(kind: int, y: Matrix, v: Matrix, entries: list[Any], i: Tensor, j: Tensor, numbers: Tensor) -> None:
    number = entries[0][2]
    alike = all(entry[2] == number for entry in entries)
    everything = range(len(y.data))
    whole = len(entries) == len(y.data) and all(e[0] == k for e, k in zip(entries, everything, strict=True))
    if kind == SCALE:
        if whole and alike:
            y.data.mul_(number)
        elif alike:
            y.data.index_copy_(0, i, y.data[i].mul_(number))
        else:
            y.data.index_copy_(0, i, y.data[i].mul_(numbers[:, None]))
        return
    same = entries[0][1]
    if all(entry[1] == same for entry in entries):
        other = v.data[same]
        other = other.expand(len(entries), -1) if not whole or kind == LERP else other
    elif whole and len(v.data) == len(y.data) and all(e[1] == k for e, k in zip(entries, everything, strict=True)):
        other = v.data
    else:
        other = v.data[j]
    if kind == COPY:
        if whole:
            y.data.copy_(other)
        else:
            y.data.index_copy_(0, i, other)
    elif kind == ADD:
        if whole and alike:
            y.data.add_(other, alpha=number)
        elif alike:
            y.data.index_add_(0, i, other, alpha=number)
        else:
            y.data.index_add_(0, i, other * numbers[:, None])
    elif whole:
        y.data.lerp_(other, numbers[:, None])
    else:
        y.data.index_copy_(0, i, torch.lerp(y.data[i], other, numbers[:, None]))
