"""ClusterModel: what all predictions for one cluster share. Forecast: the result of one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gossamer import wire
from gossamer.plan.cluster_spec import ELEMENT_BYTES, ClusterSpec, GroupShape
from gossamer.plan.runtime_model.comm_times import CommTime, CommTimes
from gossamer.replica_time import MAX_RATE
from gossamer.seeds import stream

NUM_STEPS = 96
NUM_WARM_UP_STEPS = 32
"""Steps that are not counted where workers drift out of step with each other after the start."""


@dataclass(frozen=True)
class Forecast:
    """Predicted cost of a method; arrays have one entry per simulated run."""

    step_s: np.ndarray
    no_comm_step_s: np.ndarray
    """The step if communication took no time."""
    dominant_comm: CommTime
    bytes_per_step: float
    contraction: float
    """ρ per step; see ``gossamer.topology.disagreement``."""
    memory_vectors: float
    """Extra memory, in vectors as long as the parameters."""
    late_steps: float = 0.0
    """Steps after which most of a gradient takes effect, where that is the price for equal models."""


@dataclass(frozen=True)
class ClusterModel:
    """A cluster that trains a model of ``parameters`` parameters, simulated ``num_runs`` times."""

    spec: ClusterSpec
    parameters: int
    seed: int = 0
    num_runs: int = 8
    wire: str = "float32"
    """How models travel (``gossamer.wire``)."""
    comm: CommTimes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "comm", CommTimes(self.spec))

    @property
    def workers(self) -> int:
        return self.spec.workers

    @property
    def model_bytes(self) -> int:
        return ELEMENT_BYTES * self.parameters

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes of the parameters as they travel."""
        return wire.exchange_bytes(wire.find(self.wire), self.parameters, ELEMENT_BYTES)

    @property
    def all_workers(self) -> GroupShape:
        return GroupShape(self.workers, self.spec.nodes, 1)

    @cached_property
    def compute_s(self) -> np.ndarray:
        """Random compute times, [steps, runs, workers]."""
        return self.draw_compute(NUM_STEPS)

    def draw_compute(self, num_steps: int) -> np.ndarray:
        rng = stream(self.seed, "plan", self.workers)
        drawn = self.spec.compute.draw(rng, (num_steps, self.num_runs, self.spec.ranks))
        if self.spec.replica is None:
            return drawn
        # A replica is as slow as its slowest rank.
        of_ranks = drawn.reshape(num_steps, self.num_runs, self.workers, self.spec.replica.ranks)
        slowest: np.ndarray = of_ranks.max(axis=-1) + self.inner_s
        return slowest

    @cached_property
    def inner_s(self) -> float:
        """How long a step waits for what the ranks of a replica send each other."""
        replica, compute = self.spec.replica, self.spec.compute
        if replica is None:
            return 0.0
        backward_s = compute.estimated_backward_s
        return replica.exposed_s(self.model_bytes, max(0.0, compute.mean_s - backward_s), backward_s)

    @property
    def max_rate(self) -> float:
        """How many pairwise exchanges a worker can make per step, however fast the links are."""
        return MAX_RATE if self.spec.ranks > self.workers else math.inf

    @cached_property
    def mean_compute_s(self) -> float:
        return float(self.compute_s.mean())

    @cached_property
    def comm_noise(self) -> np.ndarray:
        """One standard normal number per run: whether its messages are slow or fast on average."""
        return stream(self.seed, "luck").standard_normal(self.num_runs)

    def comm_s(self, comm: CommTime) -> np.ndarray:
        return comm.seconds * comm_factor(comm.spread, self.comm_noise)

    def update_s(self, num_passes: float) -> float:
        """Return the time of this many passes over a rank's part of the parameters plus the overhead of a step."""
        costs, replica = self.spec.costs, self.spec.replica
        own_bytes = self.model_bytes * (1.0 if replica is None else replica.part)
        return num_passes * own_bytes / costs.mixing_bytes_per_s + costs.overhead_s

    def compute_during_comm(self, compute_s: np.ndarray, comm_s: np.ndarray | float) -> np.ndarray:
        """Return compute times that a message slows down, in flight for ``comm_s`` from their start."""
        slowdown = self.spec.costs.slowdown
        slowed: np.ndarray = compute_s + np.minimum(comm_s, compute_s * slowdown) * (1 - 1 / slowdown)
        return slowed


def comm_factor(spread: np.ndarray | float, noise: np.ndarray) -> np.ndarray:
    """Return a factor of mean 1 on the mean time of a run's messages, which vary by ``spread`` one by one."""
    spread_of_mean = spread / math.sqrt(NUM_STEPS)
    factor: np.ndarray = np.exp(spread_of_mean * (noise - spread_of_mean / 2))
    return factor
