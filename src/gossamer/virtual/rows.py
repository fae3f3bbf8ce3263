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

import torch
from torch import Tensor

from gossamer.virtual.buckets import (
    ADD,
    ADD_AGAIN,
    COPY,
    GRADIENT,
    LERP,
    MEAN,
    PHASES,
    SCALE,
    UPDATE,
    Bucket,
    Channel,
    Matrix,
    is_wide,
    load,
)

WAVE = 1 << 20
"""Levels between two waves of gradients."""

NOTHING = (-1, -1, -1, -1)

PENDING_LIMIT = 1 << 16
"""Operations written down before they are executed whether somebody looks or not."""


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


class Pool:
    """Rows to lend: as many as there are workers to begin with; long ones are made one by one, as they are needed."""

    def __init__(self, tape: Tape, width: int) -> None:
        self.tape, self.width = tape, width
        self.matrix: Matrix | None = None
        self.free: deque[tuple[Matrix, int]] = deque()

    def lend(self) -> tuple[Matrix, int]:
        if not self.free:
            self._grow()
        return self.free.popleft()

    def _grow(self) -> None:
        matrix, start = self.matrix, 0
        if matrix is None or matrix.wide:
            many = 1 if is_wide(self.width, self.tape.dtype) else self.tape.num_workers
            matrix = self.matrix = self.tape.matrix(self.width, many)
        else:
            self.tape.flush()
            start = len(matrix.data)
            matrix.data = torch.cat([matrix.data, torch.empty_like(matrix.data)])
            matrix.forget()
        self.free.extend((matrix, index) for index in range(start, len(matrix.data)))


class Tape:
    """Operations written down, and how they are executed."""

    def __init__(self, num_workers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_workers, self.dtype, self.device = num_workers, dtype, device
        self.run_gradients: Callable[[Bucket], None] | None = None
        self.run_updates: Callable[[Bucket], None] | None = None
        self._matrices: list[Matrix] = []
        self._pools: dict[int, Pool] = {}
        self._channels: list[Channel] = []
        self._num_pending = 0
        self._last_add = NOTHING

    def matrix(self, width: int, num_rows: int | None = None) -> Matrix:
        """A new matrix of zeros, one row per worker unless a number is given."""
        rows = self.num_workers if num_rows is None else num_rows
        made = Matrix(len(self._matrices), rows, width, self.dtype, self.device)
        self._matrices.append(made)
        return made

    def temporary(self, width: int) -> Temporary:
        """A row to keep something in for a while; its content is undefined."""
        self._make_room()
        pool = self._pools.get(width)
        if pool is None:
            pool = self._pools[width] = Pool(self, width)
        matrix, index = pool.lend()
        return Temporary(self, matrix, index)

    def give_back(self, matrix: Matrix, index: int) -> None:
        self._pools[matrix.data.shape[1]].free.append((matrix, index))

    def combine(self, kind: int, target: Row, other: Any, number: float) -> bool:
        """Write down ``target ← combination of target and other``; False if it cannot be left for later."""
        if not isinstance(other, Row) or other.own is not None or target.own is not None:
            return False
        y, i, v, j = target.matrix, target.index, other.matrix, other.index
        if v is y and i == j:
            if kind == ADD:
                self.scale(target, 1.0 + number)
            return True
        self._make_room()
        level = y.written[i]
        if kind == ADD and self._last_add == (y.key, i, v.key, level) and y.read[i] < level > v.written[j]:
            # The second of two additions in a row, as every exchange makes them, needs no level of its own.
            channel, self._last_add = self._channel(ADD_AGAIN, y, v), NOTHING
        else:
            channel = self._channel(kind, y, v)
            level = y.written[i] = channel.level(max(level, y.read[i], v.written[j]))
            if kind == ADD:
                self._last_add = (y.key, i, v.key, level)
        if v.read[j] < level:
            v.read[j] = level
        channel.note(level, i, j, number)
        return True

    def scale(self, target: Row, factor: float) -> None:
        """Write down ``target ← factor · target``."""
        if target.own is not None:
            target.tensor().mul_(factor)
            return
        self._make_room()
        y, i = target.matrix, target.index
        channel = self._channel(SCALE, y, y)
        level = y.written[i] = channel.level(max(y.written[i], y.read[i]))
        channel.note(level, i, i, factor)

    def mean(self, rows: list[Any]) -> Any:
        """The mean of ``rows``: later, if they are rows of one matrix (or long ones of several), else at once."""
        first = rows[0]
        if len(rows) == 1:
            return first.clone()
        if not isinstance(first, Row) or any(
            row.own is not None or not (row.matrix is first.matrix or row.matrix.wide) for row in rows
        ):
            total = dense(first).clone()
            for row in rows[1:]:
                total += dense(row)
            return total.div_(len(rows))
        out = self.temporary(len(first))
        y, i, members = out.matrix, out.index, [(row.matrix, row.index) for row in rows]
        channel = self._channel(MEAN, y, first.matrix)
        level = channel.level(max(y.written[i], y.read[i], max(v.written[j] for v, j in members)))
        y.written[i] = level
        for v, j in members:
            if v.read[j] < level:
                v.read[j] = level
        channel.note(level, i, members, 0.0)
        return out

    def gradient(self, row: Row, job: Any) -> None:
        """Write down that ``row`` holds a point now and shall hold the gradient there."""
        self._make_room()
        g, i = row.matrix, row.index
        level = g.written[i] = (max(g.written[i], g.read[i]) // WAVE + 1) * WAVE
        self._channel(GRADIENT, g, g).note(level, i, job, 0.0)

    def update(self, row: Row, gradient: Row, lr: float) -> None:
        """Write down one optimizer step on ``row`` with ``gradient``."""
        x, i, g = row.matrix, row.index, gradient.matrix
        channel = self._channel(UPDATE, x, g)
        level = x.written[i] = channel.level(max(x.written[i], x.read[i], g.written[i]))
        if g.read[i] < level:
            g.read[i] = level
        channel.note(level, i, i, lr)

    def _make_room(self) -> None:
        if self._num_pending >= PENDING_LIMIT:
            self.flush()

    def _channel(self, kind: int, y: Matrix, v: Matrix) -> Channel:
        """Where to note one more operation of this kind."""
        self._num_pending += 1
        key = kind << 32 | v.key
        channel = y.channels.get(key)
        if channel is None:
            channel = y.channels[key] = Channel(kind, y, v, len(self._channels) % PHASES)
            self._channels.append(channel)
        return channel

    def flush(self) -> None:
        """Execute everything written down."""
        if not self._num_pending:
            return
        pending: list[tuple[int, Bucket]] = []
        for channel in self._channels:
            pending += channel.buckets.items()
            channel.buckets = {}
        # Within a level, a second addition comes after the first.
        buckets = [bucket for _, bucket in sorted(pending, key=lambda item: (item[0], item[1].kind))]
        self._num_pending, self._last_add = 0, NOTHING
        for matrix in self._matrices:
            matrix.forget()
        self._execute(buckets)

    def _execute(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            if bucket.whole:
                bucket.sort()
        buckets = [piece for bucket in buckets for piece in bucket.pieces()]
        load(buckets, self.dtype, self.device)
        for bucket in buckets:
            if bucket.kind == GRADIENT:
                assert self.run_gradients is not None
                self.run_gradients(bucket)
            elif bucket.kind == UPDATE:
                assert self.run_updates is not None
                self.run_updates(bucket)
            else:
                bucket.run()
