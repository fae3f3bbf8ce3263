"""Storage of the workers' vectors: matrices with one row per worker, and pools that lend single rows."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from gossamer.vectors import memory
from gossamer.vectors.flat import ALIGNMENT
from gossamer.virtual.compute.executor import Executor, Program

WIDE_BYTES = 1 << 20
"""Rows of at least this size are processed one by one, in place: gathering them would cost more than it saves."""

GATHER_BYTES = 256 << 20
"""Upper limit for a block of rows that is gathered from a matrix."""


class Slot:
    """The memory of one row, and the tape's stages from which on it may be read and written (see ``tape``)."""

    __slots__ = ("data", "handle", "index", "matrix", "num_rows", "pool", "readable", "writable")

    def __init__(self, pool: VectorPool, matrix: Matrix, index: int) -> None:
        self.pool, self.matrix, self.index, self.data = pool, matrix, index, matrix.data[index]
        self.handle = pool.executor.handle(self.data)
        """What stands for this row in a program."""
        self.readable = self.writable = 0
        self.num_rows = 1
        """Rows that have their content here; of temporary rows, those that are equal share a slot (``rows``)."""


class Matrix:
    """``num_rows`` vectors of one length, zero at first."""

    def __init__(self, pool: VectorPool, num_rows: int) -> None:
        width = pool.width
        if pool.wide and pool.device.type != "cpu":
            # A model uses long rows in place, so each has to begin at an aligned address.
            width += -width % (ALIGNMENT // pool.dtype.itemsize)
        data = memory.zeros(num_rows * width, pool.dtype, pool.device).view(num_rows, width)
        self.data: Tensor = data[:, : pool.width]
        self.wide = pool.wide
        self.slots: list[Slot] = [Slot(pool, self, index) for index in range(num_rows)]


class VectorPool:
    """All vectors of one length (``width`` elements): their pending programs, and free slots for temporary rows."""

    def __init__(
        self, width: int, num_workers: int, dtype: torch.dtype, device: torch.device, executor: Executor
    ) -> None:
        self.width, self.num_workers, self.executor = width, num_workers, executor
        self.dtype, self.device = dtype, device
        self.wide = width * dtype.itemsize >= WIDE_BYTES
        self.programs: dict[int, Program] = {}
        """Pending operations by stage."""
        self.free: deque[Slot] = deque()

    def lend(self) -> Slot:
        """Return the slot that has been free longest. Its content is undefined."""
        if not self.free:
            # Long vectors are allocated one by one, when they are needed.
            self.free.extend(Matrix(self, 1 if self.wide else self.num_workers).slots)
        slot = self.free.popleft()
        slot.num_rows = 1
        return slot


def scatter(data: Tensor, index: Tensor, block: Tensor) -> None:
    """Write ``data[index] = block`` for distinct rows."""
    if data.device.type == "cpu" and data.dtype in (torch.float32, torch.float64):
        # On the CPU, torch's index_copy_ takes six times as long as numpy's assignment.
        data.numpy()[index.numpy()] = block.numpy()
    else:
        data.index_copy_(0, index, block)
