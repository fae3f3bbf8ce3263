"""How long a communication takes on given machines: as measured, or as the virtual cluster's network has it.

If a group of this shape was measured, its table gives the time. Otherwise the time is the ring formula of
``gossamer.virtual.sim.network``, corrected by the formula's error on the nearest shape that was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gossamer.hardware import Link
from gossamer.plan.machines import EXCHANGE, GATHER, LATE_GATHER, MEAN, Machines, Shape, Table


@dataclass(frozen=True)
class Timing:
    """The two parts of a communication's time."""

    latency_s: float = 0.0
    transfer_s: float = 0.0
    crosses: bool = False
    """It goes between nodes."""
    spread: float = 0.0
    burst_s: float = 0.0
    """By how much a message is shorter after a pause."""

    @property
    def seconds(self) -> float:
        """In a row with others."""
        return self.latency_s + self.transfer_s

    def after(self, pause_s: float) -> Timing:
        """The same after a pause: what a link can let through at once fills up again as fast as it was used up."""
        saved = min(self.burst_s, max(0.0, pause_s), self.transfer_s)
        return replace(self, transfer_s=self.transfer_s - saved, burst_s=0.0) if saved else self


class Times:
    """Times on these machines; ``notes`` collects what they are extrapolated from."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.notes: dict[str, None] = {}
        self._known: dict[tuple[str, Shape, int], Timing] = {}

    def mean(self, shape: Shape, size_bytes: int) -> Timing:
        """A mean over a group."""
        return self._time(MEAN, shape, size_bytes)

    def exchange(self, shape: Shape, size_bytes: int) -> Timing:
        """Both ways at once between two workers."""
        return self._time(EXCHANGE, shape, size_bytes)

    def gather(self, shape: Shape, size_bytes: int) -> Timing:
        """The messages of all members, to all of them."""
        return self._time(GATHER, shape, size_bytes)

    def late_gather(self, shape: Shape, size_bytes: int) -> Timing | None:
        """A gather while a long mean is under way, which fills the queues on its way; None if it was not measured."""
        measured = any(table.kind == LATE_GATHER for table in self.machines.tables)
        return self._time(LATE_GATHER, shape, size_bytes) if measured else None

    def _time(self, kind: str, shape: Shape, size_bytes: int) -> Timing:
        if shape.members < 2:
            return Timing()
        key = (kind, shape, size_bytes)
        if key not in self._known:
            self._known[key] = self._look_up(kind, shape, size_bytes)
        return self._known[key]

    def _look_up(self, kind: str, shape: Shape, size_bytes: int) -> Timing:
        latency, transfer = formula(self.machines, kind, shape, size_bytes)
        crosses = shape.nodes > 1
        table = self._nearest(kind, shape)
        if table is None:
            if self.machines.measured:
                self.notes[f"no {kind} was measured: its time follows from the links"] = None
            return Timing(latency, transfer, crosses)
        self._note(kind, shape, table, size_bytes)
        measured = table.at(size_bytes, in_a_row=True)
        burst = max(0.0, measured - table.at(size_bytes))
        if table.shape == shape:
            own = min(table.latency_s, measured)
            return Timing(own, measured - own, crosses, table.spread, burst)
        near = formula(self.machines, kind, table.shape, size_bytes)
        latency *= _ratio(table.latency_s, near[0])
        transfer *= _ratio(max(0.0, measured - table.latency_s), near[1])
        return Timing(latency, transfer, crosses, table.spread, min(burst, transfer))

    def _nearest(self, kind: str, shape: Shape) -> Table | None:
        """The measured table whose shape is nearest; one on the same kind of links, if there is any."""

        def far(table: Table) -> tuple[float, ...]:
            other = table.shape
            return (
                float((other.nodes > 1) != (shape.nodes > 1)),
                abs(math.log(other.members / shape.members)),
                abs(math.log(other.at_once / shape.at_once)),
                abs(math.log(other.nodes / shape.nodes)),
            )

        return min((table for table in self.machines.tables if table.kind == kind), key=far, default=None)

    def _note(self, kind: str, shape: Shape, table: Table, size_bytes: int) -> None:
        tables = [other for other in self.machines.tables if other.kind == kind]
        most = max(other.shape.members for other in tables)
        if shape.members > most:
            self.notes[f"groups of {shape.members}: measured up to {most}"] = None
        elif (shape.nodes > 1) != (table.shape.nodes > 1):
            where = "across nodes" if shape.nodes > 1 else "inside a node"
            self.notes[f"a {kind} {where} was not measured: it follows from the links"] = None
        # A message that is a little longer than the longest measured is no leap.
        if size_bytes > 1.25 * table.sizes_bytes[-1]:
            self.notes[f"messages of {_size(size_bytes)}: measured up to {_size(table.sizes_bytes[-1])}"] = None


def formula(machines: Machines, kind: str, shape: Shape, size_bytes: float) -> tuple[float, float]:
    """Latency and transfer time of the virtual cluster's network, all groups of a round at once."""
    crosses = shape.nodes > 1
    link: Link = machines.between if crosses else machines.inside
    pace, latency = link.bytes_per_s, link.latency_s
    if crosses:
        pace /= shape.at_once
        if shape.members > shape.nodes:
            pace, latency = min(pace, machines.inside.bytes_per_s), max(latency, machines.inside.latency_s)
    rounds, volume = {
        MEAN: (2 * (shape.members - 1), 2 * (shape.members - 1) / shape.members * size_bytes),
        GATHER: (shape.members - 1, (shape.members - 1) * size_bytes),
        LATE_GATHER: (shape.members - 1, 2 * (shape.members - 1) * size_bytes),
        EXCHANGE: (1, size_bytes),
    }[kind]
    return rounds * latency, 0.0 if math.isinf(pace) else volume / pace


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted > 0 else 1.0


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.3g} kB"
