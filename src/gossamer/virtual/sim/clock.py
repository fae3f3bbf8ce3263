"""The two clocks of the virtual cluster: how long things take, and when neighbours meet.

``ideal`` is the papers' model. Gradients and exchanges are Poisson processes, one gradient per worker and unit of time
in expectation; both are instantaneous. A method whose workers wait for each other makes one round per unit.

``hardware`` takes times from a description of the machines: gradients take their compute time from the parameters they
started with, messages take their way over shared network cards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np

from gossamer.hardware import ComputeTimes, HardwareConfig, NodeLayout
from gossamer.seeds import exponentials, in_blocks
from gossamer.topology import Topology
from gossamer.virtual.sim.event_queue import EventQueue
from gossamer.virtual.sim.network import Network

OnDone = Callable[[float], None]


class Clock(Protocol):
    """How long things take."""

    instantaneous: bool
    """Gradients are taken at the moment they are applied, and messages arrive at once."""

    def gradient_times(self, rank: int, rng: np.random.Generator) -> Iterator[float]:
        """How long the gradients of this worker take (or how long it is until they strike)."""

    def mean_gradient_time(self, rank: int) -> float: ...

    def swap(self, now: float, a: int, b: int, size_bytes: int, done: OnDone) -> None: ...

    def mean(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None: ...

    def gather(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None: ...


class IdealClock:
    """The papers' clock."""

    def __init__(self, lockstep: bool) -> None:
        self.lockstep = lockstep
        self.instantaneous = not lockstep

    def gradient_times(self, rank: int, rng: np.random.Generator) -> Iterator[float]:
        return itertools.repeat(1.0) if self.lockstep else exponentials(rng)

    def mean_gradient_time(self, rank: int) -> float:
        return 1.0

    def swap(self, now: float, a: int, b: int, size_bytes: int, done: OnDone) -> None:
        done(now)

    def mean(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        done(now)

    gather = mean


class HardwareClock:
    """The clock of described machines."""

    instantaneous = False

    def __init__(self, config: HardwareConfig, workers: int, queue: EventQueue) -> None:
        self.compute = ComputeTimes(config.compute, config.straggler, workers)
        network = Network(NodeLayout(config, workers), workers, queue)
        self.swap, self.mean, self.gather = network.swap, network.mean, network.gather

    def gradient_times(self, rank: int, rng: np.random.Generator) -> Iterator[float]:
        return in_blocks(partial(self.compute.draw_many, rank, rng))

    def mean_gradient_time(self, rank: int) -> float:
        return self.compute.mean(rank)


class Edges:
    """Edges that fire as independent Poisson processes of rates λ_ij, drawn in blocks."""

    BLOCK = 4096

    def __init__(self, topology: Topology, rate: float, rng: np.random.Generator) -> None:
        self.edges = topology.edges
        rates = topology.rates(rate)
        self.total = float(rates.sum())
        self.cumulative = np.cumsum(rates) / self.total if self.total else rates
        self.rng = rng
        self._gaps: list[float] = []
        self._ends: list[list[int]] = []

    def draw(self) -> tuple[float, int, int]:
        """The time to the next spike, and the two workers it joins."""
        if not self._gaps:
            self._gaps = (self.rng.standard_exponential(self.BLOCK) / self.total).tolist()
            chosen = np.searchsorted(self.cumulative, self.rng.random(self.BLOCK), side="right")
            self._ends = self.edges[np.minimum(chosen, len(self.edges) - 1)].tolist()
        a, b = self._ends.pop()
        return self._gaps.pop(), a, b
