"""The time of one communication on a given cluster: measured, or by the formula of the virtual cluster's network.

If a group of this shape was measured, its table gives the time. Otherwise it is the ring formula of
``gossamer.virtual.comm.network``, scaled by the formula's error on the most similar shape that was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gossamer.hardware import Link
from gossamer.plan.cluster_spec import (
    EXCHANGE,
    GATHER,
    GATHER_DURING_MEAN,
    MEAN,
    ClusterSpec,
    GroupShape,
    TimingTable,
)


@dataclass(frozen=True)
class CommTime:
    latency_s: float = 0.0
    transfer_s: float = 0.0
    """Back to back with others."""
    crosses_nodes: bool = False
    spread: float = 0.0
    burst_s: float = 0.0
    """How much shorter the transfer is after a long pause, thanks to the burst that the link allows then."""

    @property
    def seconds(self) -> float:
        return self.latency_s + self.transfer_s

    def after_pause(self, pause_s: float) -> CommTime:
        """Return the time after a pause: a link regains its burst as fast as it used it up."""
        saved = min(self.burst_s, max(0.0, pause_s), self.transfer_s)
        return replace(self, transfer_s=self.transfer_s - saved, burst_s=0.0) if saved else self


class CommTimes:
    """Communication times on one cluster; ``notes`` collects what they are extrapolated from."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.notes: dict[str, None] = {}
        self._cache: dict[tuple[str, GroupShape, int], CommTime] = {}

    def time(self, kind: str, shape: GroupShape, size_bytes: int) -> CommTime:
        """Return the time of a communication, ``MEAN`` (an all-reduce) or another of ``COMM_KINDS``, in a group."""
        if shape.members < 2:
            return CommTime()
        replica = self.spec.replica
        if replica is not None:
            # Each rank of a replica sends its part to its counterpart, all at once.
            shape = replace(shape, at_once=shape.at_once * replica.ranks)
            size_bytes = math.ceil(replica.part * size_bytes)
        key = (kind, shape, size_bytes)
        if key not in self._cache:
            time = self._compute_time(kind, shape, size_bytes)
            if replica is not None and kind != EXCHANGE:
                time = replace(time, latency_s=time.latency_s + replica.agreement_s)
            self._cache[key] = time
        return self._cache[key]

    def _compute_time(self, kind: str, shape: GroupShape, size_bytes: int) -> CommTime:
        latency, transfer = ring_formula(self.spec, kind, shape, size_bytes)
        crosses_nodes = shape.nodes > 1
        table = self._most_similar(kind, shape)
        if table is None:
            if self.spec.measured:
                self.notes[f"no {kind} was measured: its time follows from the links"] = None
            return CommTime(latency, transfer, crosses_nodes)
        self._note(kind, shape, table, size_bytes)
        measured = table.seconds_at(size_bytes, in_a_row=True)
        burst = max(0.0, measured - table.seconds_at(size_bytes))
        if table.shape == shape:
            latency = min(table.latency_s, measured)
            return CommTime(latency, measured - latency, crosses_nodes, table.spread, burst)
        similar = ring_formula(self.spec, kind, table.shape, size_bytes)
        latency *= _ratio(table.latency_s, similar[0])
        transfer *= _ratio(max(0.0, measured - table.latency_s), similar[1])
        return CommTime(latency, transfer, crosses_nodes, table.spread, min(burst, transfer))

    def _most_similar(self, kind: str, shape: GroupShape) -> TimingTable | None:
        """Return the table whose shape is most similar, over the same kind of links if there is one."""

        def distance(table: TimingTable) -> tuple[float, ...]:
            other = table.shape
            return (
                float((other.nodes > 1) != (shape.nodes > 1)),
                abs(math.log(other.members / shape.members)),
                abs(math.log(other.at_once / shape.at_once)),
                abs(math.log(other.nodes / shape.nodes)),
            )

        return min((table for table in self.spec.tables if table.kind == kind), key=distance, default=None)

    def _note(self, kind: str, shape: GroupShape, table: TimingTable, size_bytes: int) -> None:
        largest = max(other.shape.members for other in self.spec.tables if other.kind == kind)
        if shape.members > largest:
            self.notes[f"groups of {shape.members}: measured up to {largest}"] = None
        elif (shape.nodes > 1) != (table.shape.nodes > 1):
            where = "across nodes" if shape.nodes > 1 else "inside a node"
            self.notes[f"a {kind} {where} was not measured: it follows from the links"] = None
        # A message slightly longer than the longest measured one is not worth a note.
        if size_bytes > 1.25 * table.sizes_bytes[-1]:
            self.notes[f"messages of {_size(size_bytes)}: measured up to {_size(table.sizes_bytes[-1])}"] = None


def ring_formula(spec: ClusterSpec, kind: str, shape: GroupShape, size_bytes: float) -> tuple[float, float]:
    """Return latency and transfer time in the virtual cluster's network, all groups of a round at once."""
    crosses_nodes = shape.nodes > 1
    link: Link = spec.between if crosses_nodes else spec.inside
    bytes_per_s, latency = link.bytes_per_s, link.latency_s
    if crosses_nodes:
        bytes_per_s /= shape.at_once
        if shape.members > shape.nodes:
            bytes_per_s = min(bytes_per_s, spec.inside.bytes_per_s)
            latency = max(latency, spec.inside.latency_s)
    rounds, volume = {
        MEAN: (2 * (shape.members - 1), 2 * (shape.members - 1) / shape.members * size_bytes),
        GATHER: (shape.members - 1, (shape.members - 1) * size_bytes),
        GATHER_DURING_MEAN: (shape.members - 1, 2 * (shape.members - 1) * size_bytes),
        EXCHANGE: (1, size_bytes),
    }[kind]
    return rounds * latency, 0.0 if math.isinf(bytes_per_s) else volume / bytes_per_s


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted > 0 else 1.0


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.3g} kB"
