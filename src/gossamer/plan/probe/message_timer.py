"""Time the communications that training does: exchanges, means and gathers, for every shape of group and several sizes.

A table is measured with all groups of a round communicating at once, as they do in training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from gossamer.plan.cluster_spec import (
    EXCHANGE,
    GATHER,
    GATHER_DURING_MEAN,
    MEAN,
    GroupShape,
    TimingTable,
    group_shapes,
)
from gossamer.plan.probe.session import ProbeSession
from gossamer.topology import build, fits, names

MIN_BYTES = 4096
SIZE_FACTOR = 8
"""From one message size to the next."""
MAX_REPEATS = 18
PAUSE_S = 0.05
"""Before a message that is timed alone, so that the link has regained its burst."""


class MessageTimer:
    """One process's part in timing messages; all call the same methods in the same order.

    Where a worker is a replica, rank k of it communicates with rank k of the others, all k at once.
    """

    def __init__(self, session: ProbeSession, nodes: int, vector_bytes: int, replica_size: int = 1) -> None:
        """``vector_bytes``: what a rank has of the model."""
        self.session, self.nodes, self.vector_bytes, self.replica_size = session, nodes, vector_bytes, replica_size
        self.ranks_per_node = session.workers // nodes
        self.workers, self.per_node = session.workers // replica_size, self.ranks_per_node // replica_size
        self.counterparts = tuple(range(session.rank % replica_size, session.workers, replica_size))
        """The ranks with which this one communicates."""

    def tables(self, budget_s: float, report: Callable[[str], None]) -> Iterator[TimingTable]:
        """Yield one table for each kind of communication and shape of group that training can use."""
        rounds = list(self._rounds())
        for kind, shape, groups in rounds:
            report(f"{kind} of {shape.members} workers on {shape.nodes} nodes, {shape.at_once} at once")
            yield self._table(kind, shape, groups, budget_s / len(rounds))

    def _rounds(self) -> Iterator[tuple[str, GroupShape, list[tuple[int, ...]]]]:
        """Yield each kind and shape with the groups of a round that contains it."""
        workers = self.workers
        if workers == 1:
            return
        for pair in ((0, 1), (0, self.per_node)):
            crosses_nodes = pair[1] // self.per_node > 0
            if pair[1] < workers and (crosses_nodes or self.per_node > 1):
                yield EXCHANGE, GroupShape(2, 1 + crosses_nodes, 1), self._of_ranks([pair])[:1]
        seen: set[GroupShape] = set()
        for name in names():
            if not fits(name, workers, self.nodes):
                continue
            for groups in build(name, workers=workers, nodes=self.nodes).rounds:
                members = self._of_ranks([group.members for group in groups])
                for shape in dict.fromkeys(group_shapes(members, self.ranks_per_node)):
                    if shape in seen:
                        continue
                    seen.add(shape)
                    yield MEAN, shape, members
                    if shape.members == 2 and shape.at_once > 1:
                        yield EXCHANGE, shape, members
        yield GATHER, GroupShape(workers, self.nodes, self.replica_size), self._of_ranks([tuple(range(workers))])

    def _of_ranks(self, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the groups of ranks that communicate when these groups of workers do."""
        size = self.replica_size
        return [tuple(worker * size + shard for worker in members) for members in groups for shard in range(size)]

    def _table(self, kind: str, shape: GroupShape, groups: list[tuple[int, ...]], budget_s: float) -> TimingTable:
        """Time one kind of message for all sizes; groups of other shapes in the same round communicate too."""
        own_group = next((members for members in groups if self.session.rank in members), None)
        own_shape = dict(zip(groups, group_shapes(groups, self.ranks_per_node), strict=True)).get(own_group or ())
        sizes = message_sizes(self.vector_bytes, kind, shape.members == self.workers)
        seconds: list[float] = []
        in_a_row: list[float] = []
        spread = 0.0
        for size in sizes:
            vector = torch.ones(max(1, size // 4))
            received = torch.empty_like(vector)
            repeats = self._repeats(budget_s / len(sizes), kind, own_group, vector, received)
            rested = []
            for _ in range(max(1, repeats // 3)):
                time.sleep(PAUSE_S)
                rested += self._timed(kind, own_group, vector, received)
            row = self._timed(kind, own_group, vector, received, 1 + max(1, repeats // 2))[1:]
            shared = self.session.share("times", [rested, row] if own_shape == shape else None)
            measured = [times for times in shared if times is not None]
            mean_rested, mean_row = (np.mean([times[k] for times in measured], axis=0) for k in (0, 1))
            seconds.append(_robust_mean(mean_rested))
            in_a_row.append(max(seconds[-1], _robust_mean(mean_row)))
            spread = float(np.std(np.log(mean_row))) if len(mean_row) > 2 else 0.0
        return TimingTable(
            kind=kind,
            shape=shape,
            sizes_bytes=tuple(sizes),
            seconds=tuple(seconds),
            in_a_row=tuple(in_a_row),
            spread=round(spread, 3),
        )

    def gathers_during_mean(self, budget_s: float) -> TimingTable:
        """Time small gathers of all workers; the caller keeps a long mean in flight."""
        everybody = self.counterparts
        sizes = [MIN_BYTES, max(2 * MIN_BYTES, self.vector_bytes // 64)]
        seconds: list[float] = []
        spread = 0.0
        for size in sizes:
            vector = torch.ones(size // 4)
            repeats = self._repeats(budget_s / len(sizes), GATHER, everybody, vector, vector)
            # One at a time, as in training, where compute separates them.
            times = [self._timed(GATHER, everybody, vector, vector)[0] for _ in range(max(2, repeats))]
            mean_times = np.mean(self.session.share("times", times), axis=0)
            seconds.append(_robust_mean(mean_times))
            spread = float(np.std(np.log(mean_times)))
        return TimingTable(
            kind=GATHER_DURING_MEAN,
            shape=GroupShape(len(everybody), self.nodes, self.replica_size),
            sizes_bytes=tuple(sizes),
            seconds=tuple(seconds),
            spread=round(spread, 3),
        )

    def _repeats(
        self, budget_s: float, kind: str, members: tuple[int, ...] | None, vector: Tensor, received: Tensor
    ) -> int:
        """Send one message, and return how many fit into the budget; the same number on all workers."""
        (first,) = self._timed(kind, members, vector, received)
        repeats: int = self.session.share("repeats", min(MAX_REPEATS, int(budget_s / max(first, 1e-6))))[0]
        return repeats

    def _timed(
        self, kind: str, members: tuple[int, ...] | None, vector: Tensor, received: Tensor, count: int = 1
    ) -> list[float]:
        """Return the seconds of each of ``count`` messages in a row, which all workers start together.

        A worker that is in no group (``members`` is None) only waits at the barrier.
        """
        self.session.barrier()
        times = []
        for _ in range(count):
            began = time.monotonic()
            if members is not None and kind == MEAN:
                self.session.mean(members, vector)
            elif members is not None and kind == EXCHANGE:
                self.session.exchange(members, vector, received)
            elif members is not None:
                self.session.gather(members, vector)
            times.append(time.monotonic() - began)
        return times


def message_sizes(vector_bytes: int, kind: str, all_workers: bool) -> list[int]:
    """Return sizes from 4 kB to the vector's; to twice that for means of all, as some methods send two vectors."""
    # At least two sizes: one says nothing about the bandwidth.
    largest = max(SIZE_FACTOR * MIN_BYTES, vector_bytes // 16 if kind == GATHER else vector_bytes)
    sizes = []
    size = MIN_BYTES
    while size < 0.7 * largest:
        sizes.append(size)
        size *= SIZE_FACTOR
    sizes.append(largest)
    return [*sizes, 2 * sizes[-1]] if kind == MEAN and all_workers else sizes


def _robust_mean(times: np.ndarray) -> float:
    """Return the mean without the slowest tenth, in which other programs may have had the machine."""
    return float(np.sort(times)[: max(1, math.ceil(0.9 * len(times)))].mean())
