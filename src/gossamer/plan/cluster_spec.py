"""ClusterSpec: the nodes, compute times, links and measured communication times of a cluster."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from gossamer.errors import InputError
from gossamer.hardware import Link
from gossamer.replica_time import BACKWARD_SHARE, ReplicaShape

NO_LINK = Link(math.inf, 0.0)
"""Between nodes if there is one node; inside a node if each has one worker."""

MEAN, EXCHANGE, GATHER, GATHER_DURING_MEAN = "mean", "exchange", "gather", "gather beside a mean"
ELEMENT_BYTES = 4
"""Of a parameter."""
COMM_KINDS = (MEAN, EXCHANGE, GATHER, GATHER_DURING_MEAN)
"""An all-reduce; two workers that send each other a vector; an all-gather; one that queues behind a long all-reduce."""


@dataclass(frozen=True)
class GroupShape:
    """What the time of a communication depends on, apart from its size."""

    members: int
    nodes: int
    at_once: int = 1
    """Groups that use the busiest of these nodes at the same time, this one included."""


@dataclass(frozen=True, kw_only=True)
class TimingTable:
    """Measured times of one kind of communication, by message size."""

    kind: str
    shape: GroupShape
    sizes_bytes: tuple[int, ...]
    """Ascending."""
    seconds: tuple[float, ...]
    """After a pause."""
    in_a_row: tuple[float, ...] = ()
    """Back to back, when the burst that a link allows after a pause is used up, in seconds; empty: as ``seconds``."""
    spread: float = 0.0
    """Standard deviation of the logarithm of one measurement."""

    def seconds_at(self, size_bytes: float, in_a_row: bool = False) -> float:
        """Return the time of a message: interpolated linearly, and extrapolated beyond the largest size."""
        sizes, seconds = self.sizes_bytes, (self.in_a_row or self.seconds) if in_a_row else self.seconds
        if size_bytes <= sizes[0] or len(sizes) == 1:
            return seconds[0] * max(1.0, size_bytes / sizes[0] if len(sizes) == 1 else 1.0)
        if size_bytes > sizes[-1]:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
            return seconds[-1] + slope * (size_bytes - sizes[-1])
        return float(np.interp(size_bytes, sizes, seconds))

    @property
    def latency_s(self) -> float:
        return self.seconds[0]


@dataclass(frozen=True, kw_only=True)
class ComputeProfile:
    """The time of one local step: forward, backward, optimizer."""

    mean_s: float
    spread: float = 0.0
    """σ of log-normal times; ignored if there is a sample."""
    sample_s: tuple[float, ...] = ()
    """Measured times of a typical worker."""
    factors: tuple[float, ...] = ()
    """How many times slower each worker is than the typical one, or each rank of a replica; empty: all are equal."""
    correlation: float = 0.0
    """How strongly workers are slow in the same step, from 0 to 1."""
    backward_s: float = 0.0
    """The backward pass alone; 0: unknown."""

    @property
    def estimated_backward_s(self) -> float:
        return self.backward_s or BACKWARD_SHARE * self.mean_s

    def worker_factors(self, workers: int) -> np.ndarray:
        """Return each worker's factor; with more workers than known factors, the factors repeat."""
        return np.resize(np.array(self.factors or (1.0,)), workers)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Return random times of shape [steps, …, workers]; workers of the same step are correlated."""
        factors = self.worker_factors(shape[-1])
        if not self.sample_s and self.spread == 0:
            return np.broadcast_to(self.mean_s * factors, shape)
        normal = rng.standard_normal(shape)
        if self.correlation:
            common = rng.standard_normal((*shape[:-1], 1))
            normal = math.sqrt(self.correlation) * common + math.sqrt(1 - self.correlation) * normal
        if self.sample_s:
            ordered = np.sort(self.sample_s)
            positions = (special.ndtr(normal) * len(ordered)).astype(np.int64)
            times: np.ndarray = ordered[np.minimum(positions, len(ordered) - 1)] * factors
        else:
            # exp(N(−σ²/2, σ)) has mean 1.
            times = self.mean_s * factors * np.exp(self.spread * (normal - self.spread / 2))
        return times


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What communication costs a worker apart from the transfer."""

    slowdown: float = 1.0
    """How many times longer compute takes while a message is in flight."""
    mixing_bytes_per_s: float = math.inf
    """Speed of one pass over the parameters, as when a worker moves them to a mean."""
    compressing_bytes_per_s: float = math.inf
    """Speed of compressing a gradient and adding up the others'."""
    overhead_s: float = 0.0
    """Any other time that a step takes."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster as its cluster file describes it."""

    nodes: int
    per_node: int
    compute: ComputeProfile
    inside: Link = NO_LINK
    """Between workers of the same node."""
    between: Link = NO_LINK
    """Between nodes: the network card that the workers of a node share."""
    costs: Costs = field(default_factory=Costs)
    tables: tuple[TimingTable, ...] = ()
    parameters: int = 0
    """Of the model that was measured; 0: nothing was measured."""
    memory_bytes: float = 0.0
    """Free memory of one worker; 0: unknown."""
    source: str = ""
    replica: ReplicaShape | None = None
    """What each worker consists of, if it is a replica; compute times are those of one rank of it."""

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

    @property
    def measured(self) -> bool:
        return bool(self.tables)

    @property
    def main_link(self) -> Link:
        """The link between nodes; inside the node if there is only one."""
        return self.between if self.nodes > 1 else self.inside

    @property
    def ranks(self) -> int:
        """How many devices compute."""
        return self.workers * (1 if self.replica is None else self.replica.ranks)

    def with_replicas(self, ranks: int, inside: str) -> ClusterSpec:
        """Return the same devices as replicas of ``ranks`` each, all on one node. InputError if they do not divide."""
        per_node = self.ranks // self.nodes
        if ranks < 1 or per_node % ranks:
            raise InputError(
                f"--replica-size is {ranks}: expected a divisor of the {per_node} ranks of a node, so that each "
                "replica lies within one"
            )
        declared = self.replica or ReplicaShape(1, inside, self.inside)
        replica = None if ranks == 1 else declared.with_ranks(ranks, inside)
        # Of a node with one replica only the links inside that are known.
        link = declared.link if self.inside == NO_LINK else self.inside
        return dataclasses.replace(self, per_node=per_node // ranks, inside=link, replica=replica)

    def with_workers(self, workers: int) -> ClusterSpec:
        """Return a cluster of the same kind of nodes with this many workers; a single node just gets more or fewer."""
        if workers == self.workers:
            return self
        per_node = min(self.per_node, workers)
        if self.nodes == 1:
            per_node = workers
        while workers % per_node:
            per_node -= 1
        return dataclasses.replace(self, nodes=workers // per_node, per_node=per_node)


def group_shapes(groups: list[tuple[int, ...]], per_node: int) -> list[GroupShape]:
    """Return the shape of each group of a round, all groups communicating at once."""
    spans = [frozenset(rank // per_node for rank in members) for members in groups]
    crossing: dict[int, int] = {}
    within: dict[int, int] = {}
    for span in spans:
        for node in span:
            count = crossing if len(span) > 1 else within
            count[node] = count.get(node, 0) + 1
    return [
        GroupShape(
            len(members),
            len(span),
            max(crossing[node] for node in span) if len(span) > 1 else within[next(iter(span))],
        )
        for members, span in zip(groups, spans, strict=True)
    ]
