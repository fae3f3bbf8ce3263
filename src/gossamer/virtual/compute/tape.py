"""The tape: operations on workers' vectors, written down in the order in which they happen, executed in larger chunks.

Simulated time never depends on the numbers in a vector, so the cluster may run ahead of the arithmetic: an in-place
operation on a row, a mean, a gradient, an optimizer step is only written down. When somebody looks at a row, everything
written down is executed.

Gradients of many workers are to be computed together, and so are optimizer steps. The tape therefore runs in *stages*.
Even stages are programs: small operations, executed in the order in which they were written down. Odd stages are
batches: gradients, optimizer steps, means over all workers, that do not depend on each other. Every row remembers from
which stage on it can be read and written; an operation goes into the earliest stage that its rows allow. Gradients
start a new *wave* of stages: everything cheap that can run before them does, and they meet in batches as large as the
dependencies allow.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gossamer import memory
from gossamer.flat import ALIGNMENT
from gossamer.vector_math import Sum
from gossamer.virtual.compute.blocks import WIDE_BYTES
from gossamer.virtual.compute.executor import Program, TorchExecutor, executor
from gossamer.virtual.compute.rows import Row, Slot, dense

WAVE = 1 << 20
"""Stages from one batch of gradients to the next, which is the last of its wave; a power of two."""

PENDING_LIMIT = 1 << 14
"""Operations written down before they are executed whether somebody looks or not."""


class NotTogether(Exception):
    """Rows of different lengths, or one that has left the tape."""


class Matrix:
    """Vectors of one kind, one row per worker."""

    def __init__(self, pool: VectorPool, num_rows: int) -> None:
        tape, width = pool.tape, pool.width
        if pool.wide and tape.device.type != "cpu":
            # So that each of them begins where a model can work with it.
            width += -width % (ALIGNMENT // tape.dtype.itemsize)
        data = memory.zeros(num_rows * width, tape.dtype, tape.device).view(num_rows, width)
        self.data: Tensor = data[:, : pool.width]
        self.wide = pool.wide
        self.slots: list[Slot] = [Slot(pool, self, index) for index in range(num_rows)]


class VectorPool:
    """All vectors of one length: what is pending among them, and slots to lend."""

    def __init__(self, tape: Tape, width: int) -> None:
        self.tape, self.width = tape, width
        self.wide = width * tape.dtype.itemsize >= WIDE_BYTES
        self.programs: dict[int, Program] = {}
        """By stage."""
        self.free: deque[Slot] = deque()

    def lend(self) -> Slot:
        """A slot whose content is undefined: the one that has been free longest."""
        if not self.free:
            # Long ones are made one by one, as they are needed.
            self.free.extend(Matrix(self, 1 if self.wide else self.tape.num_workers).slots)
        return self.free.popleft()


Pending = list[Any]
"""Slots that are to be written, each followed by what is to be done: the mini-batch of a gradient, the learning rate of
a step. Flat, as programs are: through many small objects Python would look for garbage, again and again."""


class Batch:
    """Gradients or optimizer steps of different workers, to be made together."""

    def __init__(self, pending: Pending) -> None:
        slots: list[Slot] = pending[::2]
        self.target = slots[0].matrix
        self.rows = [slot.index for slot in slots]
        self.jobs = pending[1::2]
        self.whole = len(slots) == len(self.target.slots)
        """All rows of the matrix are written; they are in order, so no index is needed."""
        if self.whole:
            order = sorted(range(len(slots)), key=self.rows.__getitem__)
            self.rows = [self.rows[k] for k in order]
            self.jobs = [self.jobs[k] for k in order]


class Tape:
    """Operations written down, and how they are executed."""

    def __init__(self, num_workers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_workers, self.dtype, self.device = num_workers, dtype, device
        self.executor = executor(dtype, device)
        self.run_gradients: Callable[[Batch], None]
        self.run_updates: Callable[[Batch], None]
        self._pools: dict[int, VectorPool] = {}
        self._gradients: dict[int, Pending] = defaultdict(list)
        self._updates: dict[int, Pending] = defaultdict(list)
        self._means: dict[int, list[tuple[Matrix, Slot]]] = defaultdict(list)
        self._first_stage = 0
        """Earlier ones have been executed."""
        self._num_pending = 0

    def pool(self, width: int) -> VectorPool:
        """Where the vectors of this length are."""
        pool = self._pools.get(width)
        if pool is None:
            pool = self._pools[width] = VectorPool(self, width)
        return pool

    def matrix(self, width: int) -> Matrix:
        """A new matrix of zeros, one row per worker."""
        return Matrix(self.pool(width), self.num_workers)

    def combine(self, sums: Sequence[Sum]) -> None:
        """Write down sums (``gossamer.vector_math``), or make them at once if not all of it is rows of one length.

        A row that is not kept may be its own only term.
        """
        if self._num_pending >= PENDING_LIMIT:
            self.flush()
        stage, pool = self._first_stage, sums[0][0].slot.pool
        operations: Program = []
        written, read = [], []
        try:
            for row, keep, terms in sums:
                y = row.slot
                if row.own is not None or y.pool is not pool:
                    raise NotTogether
                if stage < y.writable:
                    stage = y.writable
                written.append(y)
                handle = y.handle
                for number, term in terms:
                    v = term.slot
                    if term.own is not None or v.pool is not pool:
                        raise NotTogether
                    if stage < v.readable:
                        stage = v.readable
                    read.append(v)
                    operations += (handle, v.handle, keep, number)
                    keep = 1.0
        except (NotTogether, AttributeError):  # a tensor or a number has no place on a tape
            _combine_now(sums)
            return
        for v in read:
            if v.writable < stage:
                v.writable = stage
        for y in written:
            y.readable = y.writable = stage
        self._num_pending += len(read)
        program = pool.programs.get(stage)
        if program is None:
            pool.programs[stage] = operations
        else:
            program += operations

    def mean(self, rows: list[Any]) -> Any:
        """The mean of ``rows``: later, if all of them are rows, else at once."""
        first = rows[0]
        if len(rows) == 1:
            return first.clone()
        if not all(isinstance(row, Row) and row.own is None for row in rows):
            total = dense(first).clone()
            for row in rows[1:]:
                total += dense(row)
            return total.div_(len(rows))
        out, matrix = first.another(), first.slot.matrix
        if [row.slot for row in rows] == matrix.slots:
            self._mean_of_all(matrix, out.slot)
            return out
        out.copy_(first)
        for row in rows[1:]:
            out.add_(row)
        return out.mul_(1 / len(rows))

    def _mean_of_all(self, matrix: Matrix, out: Slot) -> None:
        stage = max(self._first_stage, out.writable, max(slot.readable for slot in matrix.slots)) + 1
        self._num_pending += 1
        out.readable = out.writable = stage + 1
        for slot in matrix.slots:
            slot.writable = max(slot.writable, stage + 1)
        self._means[stage].append((matrix, out))

    def gradient(self, row: Row, job: Any) -> None:
        """Write down that ``row`` holds a point now and shall hold the gradient there."""
        slot = row.slot
        ready = slot.writable
        if ready < self._first_stage:
            ready = self._first_stage
        stage = ready | WAVE - 1
        slot.readable = slot.writable = stage + 1
        self._num_pending += 1
        self._gradients[stage] += (slot, job)

    def update(self, row: Row, gradient: Row, lr: float) -> None:
        """Write down one optimizer step on ``row`` with ``gradient``."""
        x, g = row.slot, gradient.slot
        ready = x.writable
        if ready < g.readable:
            ready = g.readable
        if ready < self._first_stage:
            ready = self._first_stage
        stage = ready + 1
        x.readable = x.writable = stage + 1
        if g.writable <= stage:
            g.writable = stage + 1
        self._num_pending += 1
        self._updates[stage] += (x, lr)

    def flush(self) -> None:
        """Execute everything written down."""
        if not self._num_pending:
            return
        stages = self._take_stages()
        for _, run in sorted(stages, key=itemgetter(0)):
            run()

    def _take_stages(self) -> list[tuple[int, Callable[[], None]]]:
        """Everything written down, and when it is to run; nothing is pending any more."""
        pools = [pool for pool in self._pools.values() if pool.programs]
        runs = self.executor.load([(program, pool.width) for pool in pools for program in pool.programs.values()])
        stages = list(zip((stage for pool in pools for stage in pool.programs), runs, strict=True))
        stages += [(stage, partial(self.run_gradients, Batch(pending))) for stage, pending in self._gradients.items()]
        stages += [(stage, partial(self.run_updates, Batch(pending))) for stage, pending in self._updates.items()]
        stages += [(stage, partial(_run_means, means)) for stage, means in self._means.items()]
        for by_stage in (*(pool.programs for pool in pools), self._gradients, self._updates, self._means):
            by_stage.clear()
        self._num_pending = 0
        self._first_stage = (max(stage for stage, _ in stages) | WAVE - 1) + 1
        return stages


def _combine_now(sums: Sequence[Sum]) -> None:
    operations: Program = []
    for vector, keep, terms in sums:
        for number, term in terms:
            operations += (dense(vector), dense(term), keep, number)
            keep = 1.0
    TorchExecutor().run(operations)


def _run_means(means: list[tuple[Matrix, Slot]]) -> None:
    for matrix, out in means:
        torch.mean(matrix.data, 0, out=out.data)
