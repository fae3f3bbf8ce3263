"""What the planner knows of a cluster: nodes, compute times, links, and what was measured of messages."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np
from scipy import special

from gossamer.hardware import Link

BACKWARD_SHARE = 2 / 3
"""Of a gradient's time, where the parts were not measured: the backward pass costs about two forward passes."""

NOWHERE = Link(math.inf, 0.0)
"""The link where there is none: between nodes when there is one node, inside when each has one worker."""

MEAN, EXCHANGE, GATHER, LATE_GATHER = "mean", "exchange", "gather", "gather beside a mean"
KINDS = (MEAN, EXCHANGE, GATHER, LATE_GATHER)


@dataclass(frozen=True)
class Shape:
    """What the time of a communication depends on, beside its size."""

    members: int
    """How many workers communicate."""
    nodes: int
    """On how many nodes they are."""
    at_once: int = 1
    """How many such groups use the busiest of their nodes at the same time, this one included."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Measured: how long one kind of communication takes, by the size of its message."""

    kind: str
    shape: Shape
    sizes_bytes: tuple[int, ...]
    """Ascending."""
    seconds: tuple[float, ...]
    """After a pause."""
    in_a_row: tuple[float, ...] = ()
    """One right after the other, where what a link lets through at once after a pause is used up; empty: the same."""
    spread: float = 0.0
    """Standard deviation of the logarithm of one measurement."""

    def at(self, size_bytes: float, in_a_row: bool = False) -> float:
        """Seconds for a message of this size: linear between what was measured, and beyond it."""
        sizes, seconds = self.sizes_bytes, (self.in_a_row or self.seconds) if in_a_row else self.seconds
        if size_bytes <= sizes[0] or len(sizes) == 1:
            return seconds[0] * max(1.0, size_bytes / sizes[0] if len(sizes) == 1 else 1.0)
        if size_bytes > sizes[-1]:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
            return seconds[-1] + slope * (size_bytes - sizes[-1])
        return float(np.interp(size_bytes, sizes, seconds))

    @property
    def latency_s(self) -> float:
        """What the smallest message takes."""
        return self.seconds[0]


@dataclass(frozen=True, kw_only=True)
class ComputeProfile:
    """How long workers take for one step of their own: forward, backward, optimizer."""

    mean_s: float
    spread: float = 0.0
    """σ of log-normal times; not used where there is a sample."""
    sample_s: tuple[float, ...] = ()
    """Measured times of a typical worker."""
    factors: tuple[float, ...] = ()
    """How many times slower each worker is than the typical one; empty: all alike."""
    correlation: float = 0.0
    """How strongly workers are slow together, from 0 to 1."""
    backward_s: float = 0.0
    """The backward pass alone; 0: not known."""

    @property
    def typical_backward_s(self) -> float:
        return self.backward_s or BACKWARD_SHARE * self.mean_s

    def worker_factors(self, workers: int) -> np.ndarray:
        """The factor of each of so many workers; more of them than known repeat the pattern."""
        return np.resize(np.array(self.factors or (1.0,)), workers)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Times of shape [steps, …, workers]; what a step has in common is common to its last axis."""
        factors = self.worker_factors(shape[-1])
        if not self.sample_s and self.spread == 0:
            return np.broadcast_to(self.mean_s * factors, shape)
        normal = rng.standard_normal(shape)
        if self.correlation:
            common = rng.standard_normal((*shape[:-1], 1))
            normal = math.sqrt(self.correlation) * common + math.sqrt(1 - self.correlation) * normal
        if self.sample_s:
            ordered = np.sort(self.sample_s)
            places = (special.ndtr(normal) * len(ordered)).astype(np.int64)
            times: np.ndarray = ordered[np.minimum(places, len(ordered) - 1)] * factors
            return times
        # exp(N(−σ²/2, σ)) has mean 1.
        drawn: np.ndarray = self.mean_s * factors * np.exp(self.spread * (normal - self.spread / 2))
        return drawn


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What communication costs a worker beside the time on the wire."""

    slowdown: float = 1.0
    """How many times longer compute takes while a message is under way."""
    mixing_bytes_per_s: float = math.inf
    """How fast a worker gets through its parameters when it moves them to a mean."""
    compressing_bytes_per_s: float = math.inf
    """How fast it gets through a gradient when it compresses it and adds up the others'."""
    overhead_s: float = 0.0
    """What a step costs beside all that."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """A cluster, as its file describes it."""

    nodes: int
    per_node: int
    compute: ComputeProfile
    inside: Link = NOWHERE
    between: Link = NOWHERE
    costs: Costs = field(default_factory=Costs)
    tables: tuple[Table, ...] = ()
    parameters: int = 0
    """Of the model that was measured; 0: none was."""
    memory_bytes: float = 0.0
    """What one worker had left; 0: not known."""
    source: str = ""
    """Where this comes from, in words."""

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

    @property
    def measured(self) -> bool:
        return bool(self.tables)

    def with_workers(self, workers: int) -> Machines:
        """The same kind of nodes, as many as so many workers need; fewer workers than a node has are on one."""
        if workers == self.workers:
            return self
        per_node = min(self.per_node, workers)
        if self.nodes == 1:
            per_node = workers
        while workers % per_node:
            per_node -= 1
        return dataclasses.replace(self, nodes=workers // per_node, per_node=per_node)


def shapes(groups: list[tuple[int, ...]], per_node: int) -> list[Shape]:
    """The shape of each of the groups of a round, which are all at work at once."""
    spans = [frozenset(rank // per_node for rank in members) for members in groups]
    crossing: dict[int, int] = {}
    within: dict[int, int] = {}
    for span in spans:
        for node in span:
            count = crossing if len(span) > 1 else within
            count[node] = count.get(node, 0) + 1
    return [
        Shape(
            len(members),
            len(span),
            max(crossing[node] for node in span) if len(span) > 1 else within[next(iter(span))],
        )
        for members, span in zip(groups, spans, strict=True)
    ]
