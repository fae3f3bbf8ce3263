"""What a probe has measured, and how the measurements of all workers become a ClusterSpec."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from gossamer.hardware import Link
from gossamer.plan.cluster_spec import (
    EXCHANGE,
    GATHER,
    MEAN,
    NO_LINK,
    ClusterSpec,
    ComputeProfile,
    Costs,
    TimingTable,
)
from gossamer.replica_time import ReplicaShape
from gossamer.seeds import stream

MIN_SLOWNESS = 0.05
"""Relative difference from the typical worker up to which a worker counts as equally fast."""
MAX_SAMPLE = 200
MIN_CORRELATED_STEPS = 8
NUM_DRAWN_STEPS = 20_000
"""From which the expected compute of the slowest rank of a replica is found."""


@dataclass
class Findings:
    ranks: int
    """Processes that measured: one for each worker, or for each rank of a replica."""
    nodes: int
    parameters: int
    replica: ReplicaShape | None = None
    """What each worker consists of, once that was measured."""
    compute: ComputeProfile | None = None
    tables: list[TimingTable] = field(default_factory=list)
    costs: Costs = field(default_factory=Costs)
    memory_bytes: float = 0.0
    lost: str = ""
    """Which worker was lost, and during what; empty if none was."""

    def cluster_spec(self) -> ClusterSpec:
        assert self.compute is not None
        return ClusterSpec(
            nodes=self.nodes,
            per_node=self.ranks // self.nodes // (1 if self.replica is None else self.replica.ranks),
            compute=self.compute,
            inside=self._link(crosses_nodes=False),
            between=self._link(crosses_nodes=True),
            costs=self.costs,
            tables=tuple(self.tables),
            parameters=self.parameters,
            memory_bytes=self.memory_bytes,
            replica=self.replica,
            source=f"gossamer probe, {time.strftime('%Y-%m-%d %H:%M')}" + (f"; {self.lost}" if self.lost else ""),
        )

    def _link(self, crosses_nodes: bool) -> Link:
        """Return latency and bandwidth of one pair that exchanged alone."""
        for table in self.tables:
            shape = table.shape
            if table.kind == EXCHANGE and (shape.nodes > 1) == crosses_nodes and shape.at_once == 1:
                seconds = max(table.seconds[-1] - table.seconds[0], 1e-9)
                return Link((table.sizes_bytes[-1] - table.sizes_bytes[0]) / seconds, table.seconds[0])
        return NO_LINK

    @property
    def summary(self) -> str:
        kinds = [kind for kind in (EXCHANGE, MEAN, GATHER) if any(table.kind == kind for table in self.tables)]
        inside = ["messages inside replicas"] if self.replica is not None else []
        return ", ".join(["compute times", *inside, *(f"{kind}s" for kind in kinds)])


def compute_profile(
    step_times: list[list[float]], gradient_times: list[list[float]], backward_shares: list[float]
) -> ComputeProfile:
    """Reduce the times of all workers to a typical worker's sample, a factor per worker, and their correlation.

    ``backward_shares``: each worker's share of the backward pass in a gradient's time.
    """
    medians = np.array([np.median(times) for times in step_times])
    factors = medians / float(np.median(medians))
    factors = np.where(np.abs(factors - 1) < MIN_SLOWNESS, 1.0, factors)
    scaled = [np.array(times) / factor for times, factor in zip(step_times, factors, strict=True)]
    sample = np.sort(np.concatenate(scaled))
    if len(sample) > MAX_SAMPLE:
        sample = np.quantile(sample, (np.arange(MAX_SAMPLE) + 0.5) / MAX_SAMPLE)
    backward = [np.median(times) * share for times, share in zip(gradient_times, backward_shares, strict=True)]
    return ComputeProfile(
        mean_s=float(sample.mean()),
        sample_s=tuple(float(f"{time:.5g}") for time in sample),
        factors=tuple(float(f"{factor:.4g}") for factor in factors) if (factors != 1).any() else (),
        correlation=round(correlation(scaled), 2),
        backward_s=float(np.median(backward)),
    )


def waited_s(compute: ComputeProfile, rank_step_s: list[float], replica_size: int) -> float:
    """Return how long a step of a replica takes beyond the compute of its slowest rank.

    ``rank_step_s``: the mean time of each rank's steps, in which the ranks of a replica wait for each other.
    """
    drawn = compute.draw(stream(0, "probe"), (NUM_DRAWN_STEPS, len(rank_step_s)))
    slowest = drawn.reshape(NUM_DRAWN_STEPS, -1, replica_size).max(axis=-1).mean(axis=0)
    replica_step_s = np.reshape(rank_step_s, (-1, replica_size)).mean(axis=-1)
    return max(0.0, float(np.median(replica_step_s - slowest)))


def correlation(times: list[np.ndarray]) -> float:
    """Return how strongly workers are slow in the same step: their mean rank correlation, 0 if nothing varies."""
    length = min(map(len, times))
    if len(times) < 2 or length < MIN_CORRELATED_STEPS:
        return 0.0
    ranks = np.array([stats.rankdata(worker_times[:length]) for worker_times in times])
    if (ranks.std(axis=1) == 0).any():
        return 0.0
    matrix = np.corrcoef(ranks)
    return float(np.clip(matrix[np.triu_indices(len(times), 1)].mean(), 0.0, 1.0))
