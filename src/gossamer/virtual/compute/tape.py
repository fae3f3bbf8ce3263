"""The tape: operations on workers' vectors are recorded in simulated order and executed later, in batches.

Simulated time never depends on the numbers in a vector. The cluster can therefore run ahead of the arithmetic: an
in-place operation on a row, a mean, a gradient, an optimizer step is only recorded. ``flush`` executes everything that
is pending. The result is the same as if every operation had been executed at once.

**Stages.** To compute the gradients of many workers together, the tape sorts operations into numbered stages and
executes the stages in ascending order::

    0         program   small operations y = keep · y + factor · v (``executor``), in the order of recording
    1         batch     optimizer steps, means over all workers, messages that are encoded
    2         program
    …
    WAVE − 1  batch     gradients: the last stage of the first wave
    WAVE      program   the second wave begins
    …

- An *even* stage holds one program per vector length. A program runs its operations one after the other, so they may
  depend on each other.
- An *odd* stage holds batches: gradients, optimizer steps, means. Operations of one stage do not depend on each other,
  so each kind is executed in one call for all its workers.

Every slot remembers the first stage in which its row may be read (``readable``: after the last write) and written
(``writable``: after the last write and the last read). An operation goes into the earliest stage that its slots allow
and then raises those marks.

**Waves.** A gradient always goes into the last stage of the earliest possible wave of ``WAVE`` stages. Everything cheap
that can run before it does, and the gradients of all workers whose parameters are known by then are one batch. A worker
whose next gradient depends on this one comes in the next wave.

**What forces a flush.** Reading a row as a tensor: any torch function or operator that is not recorded (``rows``), and
every operation on a view of a row. Access to the optimizer's state. An observation of the cluster: losses, consensus
distance, evaluation. A worker that joins. More than ``PENDING_LIMIT`` pending operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from gossamer.vectors.vector_math import Sum, combine
from gossamer.virtual.compute.executor import Program, TorchExecutor, make_executor
from gossamer.virtual.compute.matrix import Matrix, Slot, VectorPool
from gossamer.virtual.compute.rows import Row
from gossamer.virtual.compute.tensor_like import dense

WAVE = 1 << 20
"""Stages per wave. A power of two, more than a wave ever needs."""

PENDING_LIMIT = 1 << 14
"""Recorded operations that force a flush."""


RowFunction = Callable[[list[torch.Tensor], list[torch.Tensor]], None]
"""``function(vectors, outs)`` reads some rows and writes others."""


class NotRecordable(Exception):
    """An operation on rows of different lengths, or on one that has become a tensor."""


Pending = list[Any]
"""Slots to write, each followed by the argument of its operation: a gradient's mini-batch, an optimizer step's learning
rate. Flat, as programs are."""


class Batch:
    """Gradients or optimizer steps of distinct workers, to be executed together."""

    def __init__(self, pending: Pending) -> None:
        slots: list[Slot] = pending[::2]
        self.target = slots[0].matrix
        self.rows = [slot.index for slot in slots]
        """Indices of the rows of ``target`` that are written: the ranks of the workers."""
        self.arguments = pending[1::2]
        """For each row the number of its mini-batch, or its learning rate."""
        self.covers_all = len(slots) == len(self.target.slots)
        """All rows of the matrix are written. They are in order then, so no index is needed."""
        if self.covers_all:
            order = sorted(range(len(slots)), key=self.rows.__getitem__)
            self.rows = [self.rows[k] for k in order]
            self.arguments = [self.arguments[k] for k in order]


class Tape:
    """Records operations on rows and executes them in stages."""

    def __init__(self, num_workers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_workers, self.dtype, self.device = num_workers, dtype, device
        self.executor = make_executor(dtype, device)
        self.run_gradients: Callable[[Batch], None]
        self.run_updates: Callable[[Batch], None]
        self._pools: dict[int, VectorPool] = {}
        self._gradients: dict[int, Pending] = defaultdict(list)
        self._updates: dict[int, Pending] = defaultdict(list)
        self._means: dict[int, list[tuple[Matrix, Slot]]] = defaultdict(list)
        self._functions: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self._first_stage = 0
        """All earlier stages have been executed."""
        self._num_pending = 0

    def matrix(self, width: int) -> Matrix:
        """Return a new matrix of zeros with one row of ``width`` elements per worker."""
        pool = self._pools.get(width)
        if pool is None:
            pool = VectorPool(width, self.num_workers, self.dtype, self.device, self.executor)
            self._pools[width] = pool
        return Matrix(pool, self.num_workers)

    def combine(self, sums: Sequence[Sum]) -> None:
        """Record sums (``vector_math``), or compute them at once if some term is not a row of that length.

        A row with ``keep`` 0 may be its own only term.
        """
        if self._num_pending >= PENDING_LIMIT:
            self.flush()
        stage, pool = self._first_stage, sums[0][0].slot.pool
        operations: Program = []
        written, read = [], []
        try:
            for row, keep, terms in sums:
                y = row.slot
                if row.detached is not None or y.pool is not pool:
                    raise NotRecordable
                if y.num_rows > 1:
                    y = row.leave_shared_slot()
                if stage < y.writable:
                    stage = y.writable
                written.append(y)
                handle = y.handle
                for factor, term in terms:
                    v = term.slot
                    if term.detached is not None or v.pool is not pool:
                        raise NotRecordable
                    if stage < v.readable:
                        stage = v.readable
                    read.append(v)
                    operations += (handle, v.handle, keep, factor)
                    keep = 1.0
        except (NotRecordable, AttributeError):  # a tensor or a number has no slot
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

    def mean(self, rows: list[Any], weights: Sequence[float] | None = None) -> Any:
        """Return the mean of ``rows``: recorded if all of them are rows on the tape, else computed at once.

        With ``weights``, it is the weighted mean; zeros if all weights are 0.
        """
        first = rows[0]
        if weights is not None:
            return self._weighted_mean(rows, weights)
        if len(rows) == 1:
            return first.clone()
        if not all(isinstance(row, Row) and row.detached is None for row in rows):
            total = dense(first).clone()
            for row in rows[1:]:
                total += dense(row)
            return total.div_(len(rows))
        out, matrix = first.temporary(), first.slot.matrix
        if [row.slot for row in rows] == matrix.slots:
            self._record_mean(matrix, out.slot)
            return out
        out.copy_(first)
        for row in rows[1:]:
            out.add_(row)
        return out.mul_(1 / len(rows))

    @staticmethod
    def _weighted_mean(rows: list[Any], weights: Sequence[float]) -> Any:
        total, first = sum(weights), rows[0]
        # What has no weight does not count, even if it is not finite.
        weighted = [(weight / total, row) for weight, row in zip(weights, rows, strict=True) if weight]
        if not weighted:
            return torch.zeros(len(first), dtype=first.dtype, device=first.device)
        if all(isinstance(row, Row) for row in rows):
            out = first.temporary()
        else:
            out = torch.empty(len(first), dtype=first.dtype, device=first.device)
        combine((out, 0.0, weighted))
        return out

    def _record_mean(self, matrix: Matrix, out: Slot) -> None:
        stage = max(self._first_stage, out.writable, max(slot.readable for slot in matrix.slots)) + 1
        self._num_pending += 1
        out.readable = out.writable = stage + 1
        for slot in matrix.slots:
            slot.writable = max(slot.writable, stage + 1)
        self._means[stage].append((matrix, out))

    def record(self, function: RowFunction, vectors: list[Any]) -> list[Any]:
        """Record ``function(vectors, outs)``, which writes one new row for each of ``vectors``; return these rows.

        It is computed at once if some vector is not a row on the tape.
        """
        if not all(isinstance(row, Row) and row.detached is None for row in vectors):
            tensors = [dense(vector) for vector in vectors]
            outs: list[Any] = [torch.empty_like(tensor) for tensor in tensors]
            function(tensors, outs)
            return outs
        outs = [row.temporary() for row in vectors]
        reads, writes = [row.slot for row in vectors], [row.slot for row in outs]
        ready = max(self._first_stage, *(slot.readable for slot in reads), *(slot.writable for slot in writes))
        for slot in reads:
            slot.writable = max(slot.writable, ready + 2)
        for slot in writes:
            slot.readable = slot.writable = ready + 2
        self._num_pending += 1
        self._functions[ready + 1].append(
            lambda: function([slot.data for slot in reads], [slot.data for slot in writes])
        )
        return outs

    def gradient(self, row: Row, mini_batch: int) -> None:
        """Record that the parameters in ``row`` are replaced by the gradient there."""
        slot = row.slot
        ready = slot.writable
        if ready < self._first_stage:
            ready = self._first_stage
        stage = ready | WAVE - 1
        slot.readable = slot.writable = stage + 1
        self._num_pending += 1
        self._gradients[stage] += (slot, mini_batch)

    def update(self, row: Row, gradient: Row, lr: float) -> None:
        """Record one optimizer step on ``row`` with ``gradient``."""
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
        """Execute everything that is pending."""
        if not self._num_pending:
            return
        stages = self._take_stages()
        for _, run in sorted(stages, key=itemgetter(0)):
            run()

    def _take_stages(self) -> list[tuple[int, Callable[[], None]]]:
        """Remove everything that is pending from the tape and return it, with the number of its stage."""
        pools = [pool for pool in self._pools.values() if pool.programs]
        runs = self.executor.load([(program, pool.width) for pool in pools for program in pool.programs.values()])
        stages = list(zip((stage for pool in pools for stage in pool.programs), runs, strict=True))
        stages += [(stage, partial(self.run_gradients, Batch(pending))) for stage, pending in self._gradients.items()]
        stages += [(stage, partial(self.run_updates, Batch(pending))) for stage, pending in self._updates.items()]
        stages += [(stage, partial(_run_means, means)) for stage, means in self._means.items()]
        stages += [(stage, partial(_run_all, functions)) for stage, functions in self._functions.items()]
        batches = (self._gradients, self._updates, self._means, self._functions)
        for by_stage in (*(pool.programs for pool in pools), *batches):
            by_stage.clear()
        self._num_pending = 0
        self._first_stage = (max(stage for stage, _ in stages) | WAVE - 1) + 1
        return stages


def _combine_now(sums: Sequence[Sum]) -> None:
    operations: Program = []
    for vector, keep, terms in sums:
        for factor, term in terms:
            operations += (dense(vector), dense(term), keep, factor)
            keep = 1.0
    TorchExecutor().run(operations)


def _run_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _run_means(means: list[tuple[Matrix, Slot]]) -> None:
    for matrix, out in means:
        torch.mean(matrix.data, 0, out=out.data)
