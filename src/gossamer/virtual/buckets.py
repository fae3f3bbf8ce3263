"""Operations on rows that were written down, and how they are executed: many rows by one kernel.

A bucket holds operations of one kind and level on the rows of one matrix. No two of them write to the same row, and
none reads what another writes, so they may run in any order and all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

WIDE_BYTES = 1 << 20
"""Rows at least this long are worked on one by one, in place: gathering them would cost more than it saves."""

GATHER_BYTES = 256 << 20
"""How much may be gathered from a matrix at a time."""

PHASES = 16
"""The levels of one channel differ by multiples of this.

What workers do takes its turns: an exchange is a copy, additions, a scaling, in this order. If each of them has its own
levels, the exchanges of many workers run side by side although each began at another moment.
"""

COPY, ADD, ADD_AGAIN, SCALE, LERP, MEAN, GRADIENT, UPDATE = range(8)


def is_wide(width: int, dtype: torch.dtype) -> bool:
    """Whether rows of this length are worked on one by one."""
    return width * dtype.itemsize >= WIDE_BYTES


class Matrix:
    """Vectors of one kind, one row per worker, and the levels of each row."""

    def __init__(self, key: int, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.key = key
        self.data = torch.zeros(num_rows, width, dtype=dtype, device=device)
        self.wide = is_wide(width, dtype)
        self.channels: dict[int, Channel] = {}
        """By what is done and where it is read from: what is pending for the rows of this matrix."""
        self.forget()

    def forget(self) -> None:
        """Nothing is pending any more."""
        self.written = [0] * len(self.data)
        self.read = [0] * len(self.data)


class Channel:
    """Operations of one kind from one matrix into another that are pending, by level."""

    __slots__ = ("buckets", "kind", "phase", "source", "target")

    def __init__(self, kind: int, target: Matrix, source: Matrix, phase: int) -> None:
        self.kind, self.target, self.source, self.phase = kind, target, source, phase
        self.buckets: dict[int, Bucket] = {}

    def level(self, after: int) -> int:
        """The next level of this channel."""
        return after + 1 + (self.phase - after - 1) % PHASES

    def note(self, level: int, row: int, other: Any, number: float) -> None:
        bucket = self.buckets.get(level)
        if bucket is None:
            bucket = self.buckets[level] = Bucket(self.kind, self.target, self.source)
        bucket.rows.append(row)
        bucket.others.append(other)
        bucket.numbers.append(number)


class Bucket:
    """Operations that can run together."""

    __slots__ = ("column", "index", "kind", "numbers", "other_index", "others", "rows", "source", "target")

    def __init__(self, kind: int, target: Matrix, source: Matrix) -> None:
        self.kind, self.target, self.source = kind, target, source
        self.rows: list[int] = []
        """The rows of ``target`` that are written."""
        self.others: list[Any] = []
        """For each of them the row of ``source`` that is read; for a mean, its members, each with its matrix (the same
        for all, unless they are wide); for a gradient, its job."""
        self.numbers: list[float] = []
        """For each of them a coefficient or a learning rate."""
        # ``rows``, ``others`` and ``numbers`` on the device, once they are loaded.
        self.index: Tensor
        self.other_index: Tensor
        self.column: Tensor

    @property
    def whole(self) -> bool:
        """All rows of the matrix are written."""
        return len(self.rows) == len(self.target.data)

    @property
    def single(self) -> bool:
        """Rows are worked on one by one, because they are long or few."""
        return self.kind <= LERP and (self.target.wide or len(self.rows) <= 2)

    def sort(self) -> None:
        """By row: a whole bucket then needs no index."""
        order = sorted(range(len(self.rows)), key=self.rows.__getitem__)
        self.rows = [self.rows[k] for k in order]
        self.others = [self.others[k] for k in order]
        self.numbers = [self.numbers[k] for k in order]

    def pieces(self) -> Iterator[Bucket]:
        """The bucket, cut so that gathering its rows does not take much memory."""
        limit = max(1, GATHER_BYTES // max(1, self.target.data[0].nbytes))
        if self.whole or self.kind == GRADIENT or len(self.rows) <= limit:
            yield self
            return
        for at in range(0, len(self.rows), limit):
            piece = Bucket(self.kind, self.target, self.source)
            piece.rows = self.rows[at : at + limit]
            piece.others = self.others[at : at + limit]
            piece.numbers = self.numbers[at : at + limit]
            yield piece

    def sources(self) -> list[int]:
        """The rows of ``source`` that are read, in a row."""
        if self.kind == MEAN:
            return [row for members in self.others for _, row in members]
        return self.others if self.kind in (COPY, ADD, ADD_AGAIN, LERP) else []

    def run(self) -> None:
        """Do it, for the kinds that are plain arithmetic."""
        if self.kind == MEAN:
            self._run_means()
        elif self.single:
            for i, j, number in zip(self.rows, self.others, self.numbers, strict=True):
                _run_one(self.kind, self.target.data[i], self.source.data[j], number)
        elif self.kind == SCALE:
            self._run_scale()
        elif self.whole:
            self._run_whole()
        else:
            self._run_some()

    def _alike(self) -> bool:
        return self.numbers.count(self.numbers[0]) == len(self.numbers)

    def _run_scale(self) -> None:
        data = self.target.data
        factor = self.numbers[0] if self._alike() else self.column
        if self.whole:
            data.mul_(factor)
        else:
            scatter(data, self.index, data.index_select(0, self.index).mul_(factor))

    def _read(self) -> Tensor:
        """What is read, one row for each that is written (or one row for all)."""
        same = self.others[0]
        if self.others.count(same) == len(self.others):
            return self.source.data[same].expand(len(self.others), -1)
        if self.whole and len(self.source.data) == len(self.rows) and self.others == self.rows:
            return self.source.data
        return self.source.data.index_select(0, self.other_index)

    def _run_whole(self) -> None:
        data, other = self.target.data, self._read()
        if self.kind == COPY:
            data.copy_(other)
        elif self.kind == LERP:
            data.lerp_(other, self.column)
        elif self._alike():
            data.add_(other, alpha=self.numbers[0])
        else:
            data.addcmul_(other, self.column)

    def _run_some(self) -> None:
        data, other = self.target.data, self._read()
        if self.kind == COPY:
            scatter(data, self.index, other)
        elif self.kind == LERP:
            scatter(data, self.index, torch.lerp(data.index_select(0, self.index), other, self.column))
        elif self._alike():
            data.index_add_(0, self.index, other, alpha=self.numbers[0])
        else:
            data.index_add_(0, self.index, other * self.column)

    def _run_means(self) -> None:
        out, data = self.target.data, self.source.data
        sizes = [len(members) for members in self.others]
        if not self.target.wide and len(self.rows) > 1 and sizes.count(sizes[0]) == len(sizes):
            means = data.index_select(0, self.other_index).unflatten(0, (len(sizes), sizes[0])).mean(1)
            scatter(out, self.index, means)
            return
        at = 0
        for row, members in zip(self.rows, self.others, strict=True):
            if len(members) == len(data):
                torch.mean(data, 0, out=out[row])
            elif self.target.wide:
                first, second, *others = (matrix.data[index] for matrix, index in members)
                torch.add(first, second, out=out[row])
                for other in others:
                    out[row].add_(other)
                out[row].div_(len(members))
            else:
                torch.mean(data.index_select(0, self.other_index[at : at + len(members)]), 0, out=out[row])
            at += len(members)


def scatter(data: Tensor, index: Tensor, block: Tensor) -> None:
    """``data[index] = block``, for rows that differ."""
    if data.device.type == "cpu" and data.dtype in (torch.float32, torch.float64):
        # On CPU, torch's own takes six times as long.
        data.numpy()[index.numpy()] = block.numpy()
    else:
        data.index_copy_(0, index, block)


def load(buckets: list[Bucket], dtype: torch.dtype, device: torch.device) -> None:
    """Bring the row numbers and coefficients of all buckets that run as a batch to the device in one go."""
    buckets = [bucket for bucket in buckets if not bucket.single]
    integers: list[int] = []
    numbers: list[float] = []
    lengths: list[int] = []
    for bucket in buckets:
        sources = bucket.sources()
        integers += bucket.rows
        integers += sources
        numbers += bucket.numbers
        lengths += (len(bucket.rows), len(sources))
    # Not blocking: the CPU goes on while the GPU is busy. The copy has left the array when the call returns.
    there = torch.from_numpy(np.array(integers, dtype=np.int64)).to(device, non_blocking=True)
    columns = torch.from_numpy(np.array(numbers, dtype=np.float64)[:, None]).to(dtype).to(device, non_blocking=True)
    indices = there.split(lengths)
    for k, (bucket, column) in enumerate(zip(buckets, columns.split(lengths[::2]), strict=True)):
        bucket.index, bucket.other_index, bucket.column = indices[2 * k], indices[2 * k + 1], column


def _run_one(kind: int, y: Tensor, v: Tensor, number: float) -> None:
    if kind == COPY:
        y.copy_(v)
    elif kind == SCALE:
        y.mul_(number)
    elif kind == LERP:
        y.lerp_(v, number)
    else:
        y.add_(v, alpha=number)
