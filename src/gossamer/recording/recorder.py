"""The recorder that both worlds feed.

Its calls only note numbers down; now and then these are summed up into arrays whose size does not depend on how long
the run is, and handed to the trace, where one is written. Times are seconds since the run began (units on the ideal
clock).
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

BATCH = 1 << 16
"""Numbers noted down before they are summed up."""

MOST_GROUPS = 100_000
"""Groups of workers whose traffic is counted one by one."""

MOST_EDGES = 4_000
"""Edges in the document, those with most traffic; the rest is one sum."""

MOST_STALENESS = 255
"""Vectors that were older when they were merged count as this old."""

MAX_EVENTS = 1_000

Members = tuple[int, ...]


@dataclass(frozen=True)
class EventBatch:
    """What happened since the last time, one row each."""

    steps: np.ndarray
    """rank, began, computed, ended"""
    waits: np.ndarray
    """rank, start, end"""
    snapshots: np.ndarray
    """rank, start, end"""
    exchanges: np.ndarray
    """number of the group, start, end, bytes sent by each member"""
    exchange_names: list[str]
    merges: np.ndarray
    """rank, start, end, staleness in steps"""
    absences: np.ndarray
    """rank, start, end"""
    groups: Sequence[Members]
    """The groups of workers by their numbers."""


class Sink(Protocol):
    """Where every single event goes, if anywhere."""

    def write(self, own: Sequence[int], events: EventBatch) -> None: ...


class Recorder:
    """What the workers ``own`` of a run did: all of them in the virtual world, one in a real process."""

    def __init__(self, own: Sequence[int], sink: Sink | None = None) -> None:
        self.own, self.sink = tuple(own), sink
        self.timeline = Timeline(len(self.own))
        self.until = 0.0
        self.after = 0.0
        """When what was recorded before ended, where the run is a resumed one: its time goes on from there."""
        self.events: list[tuple[float, str]] = []
        self._row = {rank: row for row, rank in enumerate(self.own)}
        self._everybody = self.own == tuple(range(len(self.own)))
        self._num_steps = np.zeros(len(self.own), dtype=np.int64)
        self._staleness = np.zeros((len(self.own), MOST_STALENESS + 1), dtype=np.int64)
        self._oldest = 0
        self._numbers: dict[Members, int] = {}
        self._groups: list[Members] = []
        self._traffic = np.zeros((0, 2))
        self._gone: dict[int, float] = {}
        self._lock = threading.Lock()
        self._steps, self._waits, self._snapshots = array("d"), array("d"), array("d")
        self._exchanges, self._merges, self._absences = array("d"), array("d"), array("d")
        self._names: list[str] = []

    # What the worlds tell

    def stepped(self, rank: int, began: float, computed: float, ended: float) -> None:
        """A local step: its gradient came between ``began`` and ``computed``, the method's step ended at ``ended``."""
        self._steps.extend((rank, began, computed, ended))
        if len(self._steps) >= BATCH:
            self.sum_up()

    def waited(self, rank: int, start: float, end: float) -> None:
        """Within a step, the worker waited for others."""
        self._waits.extend((rank, start, end))

    def snapshot(self, rank: int, start: float, end: float) -> None:
        """The worker copied what is to travel."""
        if self.sink is not None:
            self._snapshots.extend((rank, start, end))

    def exchanged(self, members: Members, start: float, end: float, sent_bytes: int, name: str = "") -> None:
        """The members exchanged: two with each other, more in a ring, each sending ``sent_bytes`` to the next.

        ``name`` is the same at all members that tell of the same exchange.
        """
        number = self._numbers.get(members)
        if number is None:
            number = self._number(members)
        if self.sink is not None:
            self._names.append(name)
        self._exchanges.extend((number, start, end, sent_bytes))
        if len(self._exchanges) >= BATCH:
            self.sum_up()

    def merged(self, rank: int, start: float, end: float, staleness: int) -> None:
        """The worker merged an answer, ``staleness`` steps after it had sent its part."""
        self._merges.extend((rank, start, end, staleness))
        if len(self._merges) >= BATCH:
            self.sum_up()

    def gone(self, rank: int, time: float) -> None:
        """The worker is not there from now on."""
        self._gone.setdefault(rank, time)

    def back(self, rank: int, time: float) -> None:
        """The worker is there again."""
        if rank in self._gone:
            self._absences.extend((rank, self._gone.pop(rank), time))

    def say(self, time: float, events: str) -> None:
        """Something happened that a person should know."""
        if len(self.events) < MAX_EVENTS:
            self.events.append((time, events))

    def _number(self, members: Members) -> int:
        with self._lock:
            if len(self._groups) >= MOST_GROUPS and self.sink is None:
                members = ()
            number = self._numbers.setdefault(members, len(self._groups))
            if number == len(self._groups):
                self._groups.append(members)
            return number

    # What comes of it

    def sum_up(self) -> None:
        """Turn what was noted down into sums, and hand it to the trace."""
        with self._lock:
            events = EventBatch(
                steps=_taken(self._steps, 4),
                waits=_taken(self._waits, 3),
                snapshots=_taken(self._snapshots, 3),
                exchange_names=self._names,
                exchanges=_taken(self._exchanges, 4),
                merges=_taken(self._merges, 4),
                absences=_taken(self._absences, 3),
                groups=self._groups,
            )
            self._add_steps(events.steps, events.waits)
            self._add_exchanges(events.exchanges)
            self._add_merges(events.merges)
            self._add(DEAD, events.absences)
            if self.sink is not None:
                self.sink.write(self.own, events)
                del self._names[: len(events.exchanges)]

    def _add(self, kind: int, spans: np.ndarray) -> None:
        """Rows of rank, start, end."""
        if len(spans):
            self.until = max(self.until, float(spans[:, 2].max()))
            self.timeline.add(kind, self._rows(spans[:, 0]), spans[:, 1], spans[:, 2])

    def _rows(self, ranks: np.ndarray) -> np.ndarray:
        """The rows of the timeline that belong to these workers."""
        return ranks.astype(np.int64) if self._everybody else np.searchsorted(self.own, ranks)

    def _add_steps(self, steps: np.ndarray, waits: np.ndarray) -> None:
        self._num_steps += np.bincount(self._rows(steps[:, 0]), minlength=len(self.own))
        self._add(COMPUTE, steps[:, :3])
        self._add(STEP, steps[:, [0, 2, 3]])
        self._add(WAIT, waits)
        # Waiting is part of a step; what is left of that is work.
        self._add(STEP, waits[:, [0, 2, 1]])

    def _add_exchanges(self, exchanges: np.ndarray) -> None:
        if not len(exchanges):
            return
        missing = len(self._groups) - len(self._traffic)
        self._traffic = np.concatenate([self._traffic, np.zeros((missing, 2))])
        numbers = exchanges[:, 0].astype(np.int64)
        for column, weights in enumerate((exchanges[:, 3], None)):
            self._traffic[:, column] += np.bincount(numbers, weights, minlength=len(self._traffic))
        # A span for each member: those of all groups lie one after the other, and each exchange takes its stretch.
        own = [[rank for rank in group if rank in self._row] for group in self._groups]
        sizes = np.array([len(ranks) for ranks in own])
        flat = np.array([rank for ranks in own for rank in ranks], dtype=np.float64)
        firsts, lengths = (np.cumsum(sizes) - sizes)[numbers], sizes[numbers]
        spans = np.repeat(exchanges[:, :3], lengths, axis=0)
        within = np.arange(len(spans)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        spans[:, 0] = flat[np.repeat(firsts, lengths) + within]
        self._add(EXCHANGE, spans)

    def _add_merges(self, merges: np.ndarray) -> None:
        if not len(merges):
            return
        ages = merges[:, 3].astype(np.int64)
        self._oldest = max(self._oldest, int(ages.max()))
        self.until = max(self.until, float(merges[:, 2].max()))
        place = self._rows(merges[:, 0]) * (MOST_STALENESS + 1) + np.clip(ages, 0, MOST_STALENESS)
        self._staleness += np.bincount(place, minlength=self._staleness.size).reshape(self._staleness.shape)

    def edges(self) -> tuple[list[list[int]], int]:
        """Bytes and exchanges between any two workers, most traffic first, and the bytes of all edges left out."""
        sums: dict[tuple[int, int], list[int]] = {}
        other = 0
        for members, (sent_bytes, count) in zip(self._groups, self._traffic.tolist(), strict=False):
            if not members:
                other += int(sent_bytes)
            for sender, receiver in zip(members, members[1:] + members[:1], strict=True):
                if sender in self._row:
                    known = sums.setdefault((min(sender, receiver), max(sender, receiver)), [0, 0])
                    known[0] += int(sent_bytes)
                    # The two of a pair tell of the same exchange.
                    known[1] += int(count) if len(members) > 2 or sender < receiver else 0
        ordered = sorted(([a, b, *counts] for (a, b), counts in sums.items()), key=lambda row: (-row[2], row[:2]))
        return ordered[:MOST_EDGES], other + sum(row[2] for row in ordered[MOST_EDGES:])

    def document(self, now: float | None = None) -> dict[str, Any]:
        """Everything until ``now`` as plain data, for JSON."""
        self.sum_up()
        with self._lock:
            until = self.until if now is None else max(now, self.until)
            totals, timeline = self.timeline.totals(), self.timeline
            if self._gone:
                timeline = Timeline(len(self.own))
                timeline.width, timeline.shares = self.timeline.width, self.timeline.shares.copy()
                rows = np.array([self._row[rank] for rank in self._gone])
                starts = np.minimum(np.array(list(self._gone.values())), until)
                timeline.add(DEAD, rows, starts, np.full(len(rows), until))
                totals = timeline.totals()
            edges, other = self.edges()
            return {
                "format": FORMAT,
                "workers": list(self.own),
                "until": until,
                "steps": self._num_steps.tolist(),
                "time": {name: [round(value, 9) for value in totals[k].tolist()] for k, name in enumerate(KINDS)},
                "staleness": self._staleness_document(),
                "edges": edges,
                "other_bytes": other,
                "timeline": timeline.document(until),
                "events": [list(item) for item in self.events],
            }

    def _staleness_document(self) -> dict[str, Any]:
        counts, merges = self._staleness.sum(axis=0), self._staleness.sum(axis=1)
        means = (self._staleness @ np.arange(MOST_STALENESS + 1)) / np.maximum(merges, 1)
        return {
            "counts": [[age, int(counts[age])] for age in np.flatnonzero(counts).tolist()],
            "worker_mean": [mean if any_ else None for mean, any_ in zip(means.tolist(), merges.tolist(), strict=True)],
            "max": self._oldest,
        }


def _taken(numbers: array[float], columns: int) -> np.ndarray:
    """The rows noted down so far, out of the array; other threads may go on adding to it meanwhile."""
    taken = numbers[:]
    del numbers[: len(taken)]
    return np.frombuffer(taken, dtype=np.float64).reshape(-1, columns)
