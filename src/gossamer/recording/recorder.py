"""The recorder that the virtual cluster and the real workers feed.

Its calls only append numbers to buffers. ``flush`` aggregates the buffers into arrays whose size does not depend on the
length of the run, and passes them to the trace if one is written. Times are seconds (gradients per worker on the ideal
clock) on any clock; the recorder subtracts its ``origin``, the time on that clock at which the run began.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gossamer.recording.timeline import COMPUTE, DEAD, EXCHANGE, KINDS, STEP, WAIT, Timeline

FORMAT = 1

BUFFER_LENGTH = 1 << 16
"""Numbers in a buffer that trigger a flush."""

MAX_GROUPS = 100_000
"""Groups of workers whose traffic is counted separately."""

MAX_EDGES = 4_000
"""Edges in the document, those with most traffic; the traffic of the rest is one sum."""

MAX_STALENESS = 255
"""Vectors that were older when they were merged are counted at this staleness."""

MAX_EVENTS = 1_000

Members = tuple[int, ...]


@dataclass(frozen=True)
class EventBatch:
    """Everything recorded since the last flush, one row per occurrence."""

    steps: np.ndarray
    """rank, start of the gradient, end of the gradient, end of the step"""
    waits: np.ndarray
    """rank, start, end"""
    snapshots: np.ndarray
    """rank, start, end"""
    exchanges: np.ndarray
    """index of the group, start, end, bytes sent by each member"""
    exchange_names: list[str]
    merges: np.ndarray
    """rank, start, end, staleness in steps"""
    absences: np.ndarray
    """rank, start, end"""
    groups: Sequence[Members]
    """The groups of workers by their index."""


class Sink(Protocol):
    """Receives every single occurrence, for a trace."""

    def write(self, ranks: Sequence[int], batch: EventBatch) -> None: ...


class Recorder:
    """Records what the workers ``ranks`` did: all workers of a virtual cluster, or the one of a real process."""

    def __init__(self, ranks: Sequence[int], sink: Sink | None = None) -> None:
        self.ranks, self.sink = tuple(ranks), sink
        self.timeline = Timeline(len(self.ranks))
        self.origin = 0.0
        self.until = 0.0
        self.resumed_after_s = 0.0
        """How long the run had lasted before it was resumed: its time continues from there."""
        self.events: list[tuple[float, str]] = []
        self._row = {rank: row for row, rank in enumerate(self.ranks)}
        self._has_all_ranks = self.ranks == tuple(range(len(self.ranks)))
        self._num_steps = np.zeros(len(self.ranks), dtype=np.int64)
        self._staleness = np.zeros((len(self.ranks), MAX_STALENESS + 1), dtype=np.int64)
        self._max_staleness = 0
        self._group_index: dict[Members, int] = {}
        self._groups: list[Members] = []
        self._traffic = np.zeros((0, 2))
        """Bytes sent by each member, and number of exchanges, by group."""
        self._absent_since: dict[int, float] = {}
        self._lock = threading.Lock()
        self._steps, self._waits, self._snapshots = array("d"), array("d"), array("d")
        self._exchanges, self._merges, self._absences = array("d"), array("d"), array("d")
        self._exchange_names: list[str] = []

    # Called by the virtual cluster and the real workers

    def stepped(self, rank: int, began: float, computed: float, ended: float) -> None:
        """A step: the worker computed its gradient from ``began`` to ``computed``; the step ended at ``ended``."""
        origin = self.origin
        self._steps.extend((rank, began - origin, computed - origin, ended - origin))
        if len(self._steps) >= BUFFER_LENGTH:
            self.flush()

    def waited(self, rank: int, start: float, end: float) -> None:
        """Within a step, the worker waited for others."""
        self._waits.extend((rank, start - self.origin, end - self.origin))

    def snapshot(self, rank: int, start: float, end: float) -> None:
        """The worker copied the vector that it will send."""
        if self.sink is not None:
            self._snapshots.extend((rank, start - self.origin, end - self.origin))

    def exchanged(self, members: Members, start: float, end: float, sent_bytes: int, name: str = "") -> None:
        """The members exchanged: two with each other, more in a ring, each sending ``sent_bytes`` to the next.

        All members that record the same exchange give it the same ``name``.
        """
        group = self._group_index.get(members)
        if group is None:
            group = self._add_group(members)
        if self.sink is not None:
            self._exchange_names.append(name)
        self._exchanges.extend((group, start - self.origin, end - self.origin, sent_bytes))
        if len(self._exchanges) >= BUFFER_LENGTH:
            self.flush()

    def merged(self, rank: int, start: float, end: float, staleness: int) -> None:
        """The worker merged an answer, ``staleness`` steps after its snapshot."""
        self._merges.extend((rank, start - self.origin, end - self.origin, staleness))
        if len(self._merges) >= BUFFER_LENGTH:
            self.flush()

    def left(self, rank: int, time: float) -> None:
        """The worker died, or has not joined yet."""
        self._absent_since.setdefault(rank, time - self.origin)

    def joined(self, rank: int, time: float) -> None:
        """The worker joined, for the first time or again."""
        if rank in self._absent_since:
            self._absences.extend((rank, self._absent_since.pop(rank), time - self.origin))

    def add_event(self, time: float, text: str) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append((time - self.origin, text))

    def _add_group(self, members: Members) -> int:
        with self._lock:
            if len(self._groups) >= MAX_GROUPS and self.sink is None:
                members = ()
            index = self._group_index.setdefault(members, len(self._groups))
            if index == len(self._groups):
                self._groups.append(members)
            return index

    # Aggregation

    def flush(self) -> None:
        """Aggregate what the buffers hold, and pass it to the trace."""
        with self._lock:
            batch = EventBatch(
                steps=_take(self._steps, 4),
                waits=_take(self._waits, 3),
                snapshots=_take(self._snapshots, 3),
                exchange_names=self._exchange_names,
                exchanges=_take(self._exchanges, 4),
                merges=_take(self._merges, 4),
                absences=_take(self._absences, 3),
                groups=self._groups,
            )
            self._add_steps(batch.steps, batch.waits)
            self._add_exchanges(batch.exchanges)
            self._add_merges(batch.merges)
            self._add_spans(DEAD, batch.absences)
            if self.sink is not None:
                self.sink.write(self.ranks, batch)
                del self._exchange_names[: len(batch.exchanges)]

    def _add_spans(self, kind: int, spans: np.ndarray) -> None:
        """Add rows of rank, start, end."""
        if len(spans):
            self.until = max(self.until, float(spans[:, 2].max()))
            self.timeline.add(kind, self._rows_of(spans[:, 0]), spans[:, 1], spans[:, 2])

    def _rows_of(self, ranks: np.ndarray) -> np.ndarray:
        """The rows of the timeline that belong to these ranks."""
        return ranks.astype(np.int64) if self._has_all_ranks else np.searchsorted(self.ranks, ranks)

    def _add_steps(self, steps: np.ndarray, waits: np.ndarray) -> None:
        self._num_steps += np.bincount(self._rows_of(steps[:, 0]), minlength=len(self.ranks))
        self._add_spans(COMPUTE, steps[:, :3])
        self._add_spans(STEP, steps[:, [0, 2, 3]])
        self._add_spans(WAIT, waits)
        # A wait is part of its step: a span with start and end exchanged takes it out of the step's time.
        self._add_spans(STEP, waits[:, [0, 2, 1]])

    def _add_exchanges(self, exchanges: np.ndarray) -> None:
        if not len(exchanges):
            return
        num_new_groups = len(self._groups) - len(self._traffic)
        self._traffic = np.concatenate([self._traffic, np.zeros((num_new_groups, 2))])
        groups = exchanges[:, 0].astype(np.int64)
        for column, weights in enumerate((exchanges[:, 3], None)):
            self._traffic[:, column] += np.bincount(groups, weights, minlength=len(self._traffic))
        # One span per member: the members of all groups lie in one array, and each exchange takes its slice of it.
        local_members = [[rank for rank in group if rank in self._row] for group in self._groups]
        sizes = np.array([len(ranks) for ranks in local_members])
        all_members = np.array([rank for ranks in local_members for rank in ranks], dtype=np.float64)
        firsts, lengths = (np.cumsum(sizes) - sizes)[groups], sizes[groups]
        spans = np.repeat(exchanges[:, :3], lengths, axis=0)
        index_in_slice = np.arange(len(spans)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        spans[:, 0] = all_members[np.repeat(firsts, lengths) + index_in_slice]
        self._add_spans(EXCHANGE, spans)

    def _add_merges(self, merges: np.ndarray) -> None:
        if not len(merges):
            return
        staleness = merges[:, 3].astype(np.int64)
        self._max_staleness = max(self._max_staleness, int(staleness.max()))
        self.until = max(self.until, float(merges[:, 2].max()))
        cells = self._rows_of(merges[:, 0]) * (MAX_STALENESS + 1) + np.clip(staleness, 0, MAX_STALENESS)
        self._staleness += np.bincount(cells, minlength=self._staleness.size).reshape(self._staleness.shape)

    def edges(self) -> tuple[list[list[int]], int]:
        """Bytes and exchanges between any two workers, most traffic first, and the bytes of all edges left out."""
        sums: dict[tuple[int, int], list[int]] = {}
        other_bytes = 0
        for members, (sent_bytes, count) in zip(self._groups, self._traffic.tolist(), strict=False):
            if not members:
                other_bytes += int(sent_bytes)
            for sender, receiver in zip(members, members[1:] + members[:1], strict=True):
                if sender in self._row:
                    edge = sums.setdefault((min(sender, receiver), max(sender, receiver)), [0, 0])
                    edge[0] += int(sent_bytes)
                    # Both members of a pair record the same exchange.
                    edge[1] += int(count) if len(members) > 2 or sender < receiver else 0
        ordered = sorted(([a, b, *counts] for (a, b), counts in sums.items()), key=lambda row: (-row[2], row[:2]))
        return ordered[:MAX_EDGES], other_bytes + sum(row[2] for row in ordered[MAX_EDGES:])

    def document(self, now: float | None = None) -> dict[str, Any]:
        """Everything up to ``now`` as plain data, for JSON."""
        self.flush()
        with self._lock:
            until = self.until if now is None else max(now - self.origin, self.until)
            totals, timeline = self.timeline.totals(), self.timeline
            if self._absent_since:
                # They may still join: only this document counts them as dead until now.
                timeline = Timeline(len(self.ranks))
                timeline.width, timeline.shares = self.timeline.width, self.timeline.shares.copy()
                rows = np.array([self._row[rank] for rank in self._absent_since])
                starts = np.minimum(np.array(list(self._absent_since.values())), until)
                timeline.add(DEAD, rows, starts, np.full(len(rows), until))
                totals = timeline.totals()
            edges, other_bytes = self.edges()
            return {
                "format": FORMAT,
                "workers": list(self.ranks),
                "until": until,
                "steps": self._num_steps.tolist(),
                "time": {name: [round(value, 9) for value in totals[k].tolist()] for k, name in enumerate(KINDS)},
                "staleness": self._staleness_document(),
                "edges": edges,
                "other_bytes": other_bytes,
                "timeline": timeline.document(until),
                "events": [list(event) for event in self.events],
            }

    def _staleness_document(self) -> dict[str, Any]:
        counts, merges = self._staleness.sum(axis=0), self._staleness.sum(axis=1)
        means = (self._staleness @ np.arange(MAX_STALENESS + 1)) / np.maximum(merges, 1)
        return {
            "counts": [[staleness, int(counts[staleness])] for staleness in np.flatnonzero(counts).tolist()],
            "worker_mean": [mean if any_ else None for mean, any_ in zip(means.tolist(), merges.tolist(), strict=True)],
            "max": self._max_staleness,
        }


def _take(buffer: array[float], columns: int) -> np.ndarray:
    """Remove and return the rows in a buffer; other threads may append to it meanwhile."""
    taken = buffer[:]
    del buffer[: len(taken)]
    return np.frombuffer(taken, dtype=np.float64).reshape(-1, columns)
