"""The two clocks of the virtual cluster: how long gradients and messages take.

``ideal`` is the papers' model. Gradients and exchanges are Poisson processes and take no time; the unit of time is the
expected time between two gradients of a worker. A method in lockstep makes one step per unit.

``hardware`` takes times, in seconds, from a description of the machines. A gradient is evaluated at the parameters that
the worker had when it began. Messages travel through shared NICs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np

from gossamer.hardware import ComputeTimes, HardwareConfig, NodeLayout
from gossamer.replica_time import ReplicaShape, split_gradient
from gossamer.seeds import exponentials, in_blocks
from gossamer.virtual.comm.network import Network
from gossamer.virtual.sim.event_queue import EventQueue

OnDone = Callable[[float], None]
"""``on_done(time)`` is called when a communication ends."""


class Clock(Protocol):
    """How long gradients and messages take. Communications call ``done(time)`` when they end."""

    instantaneous: bool
    """Gradients and messages take no time: a gradient is evaluated at the moment at which it is applied."""

    def gradient_times(self, rank: int, rng: np.random.Generator) -> Iterator[float]:
        """Yield the times of this worker's gradients (on the ideal clock, the times between them)."""

    def mean_gradient_time(self, rank: int) -> float: ...

    def swap(self, now: float, a: int, b: int, size_bytes: int, done: OnDone) -> None: ...

    def shift(self, now: float, source: int, to: int, size_bytes: int, done: OnDone) -> None: ...

    def mean(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None: ...

    def gather(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None: ...


class IdealClock:
    def __init__(self, lockstep: bool) -> None:
        self.lockstep = lockstep
        self.instantaneous = not lockstep

    def gradient_times(self, rank: int, rng: np.random.Generator) -> Iterator[float]:
        return itertools.repeat(1.0) if self.lockstep else exponentials(rng)

    def mean_gradient_time(self, rank: int) -> float:
        return 1.0

    def swap(self, now: float, a: int, b: int, size_bytes: int, done: OnDone) -> None:
        done(now)

    shift = swap

    def mean(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        done(now)

    gather = mean


class HardwareClock:
    """The clock of machines that ``HardwareConfig`` describes."""

    instantaneous = False

    def __init__(
        self,
        config: HardwareConfig,
        workers: int,
        queue: EventQueue,
        replica: ReplicaShape | None = None,
        size_bytes: int = 0,
    ) -> None:
        """``replica``: what each worker consists of, if it is a replica. ``size_bytes``: of the model."""
        self.compute = ComputeTimes(config.compute, config.straggler, workers)
        self.replica, self.size_bytes = replica, size_bytes
        network = Network(NodeLayout(config, workers), workers, queue, replica)
        self.swap, self.shift, self.mean, self.gather = network.swap, network.shift, network.mean, network.gather

    def gradient_times(self, rank: int, rng: np.random.Generator) -> Iterator[float]:
        draw = partial(self.compute.draw_many, rank, rng)
        if self.replica is None:
            return in_blocks(draw)
        return self._replicas_times(self.replica, in_blocks(draw))

    def _replicas_times(self, replica: ReplicaShape, times: Iterator[float]) -> Iterator[float]:
        """Yield the times of a replica's gradients from those of its ranks."""
        while True:
            slowest_s = max(itertools.islice(times, replica.ranks))
            yield slowest_s + replica.exposed_s(self.size_bytes, *split_gradient(slowest_s))

    def mean_gradient_time(self, rank: int) -> float:
        mean_s = self.compute.mean(rank)
        if self.replica is None:
            return mean_s
        return mean_s + self.replica.exposed_s(self.size_bytes, *split_gradient(mean_s))
