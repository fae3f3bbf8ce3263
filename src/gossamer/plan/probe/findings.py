"""What a probe finds out: from what every worker timed to the machines that plans are made for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from gossamer.hardware import Link
from gossamer.plan.machines import EXCHANGE, GATHER, MEAN, NOWHERE, ComputeProfile, Costs, Machines, Table


@dataclass
class Findings:
    """What has been measured so far."""

    workers: int
    nodes: int
    parameters: int
    compute: ComputeProfile | None = None
    tables: list[Table] = field(default_factory=list)
    costs: Costs = field(default_factory=Costs)
    memory_bytes: float = 0.0
    lost: str = ""
    """Who was lost, and what was being measured; empty if nobody was."""

    def machines(self) -> Machines:
        """As a cluster file holds it; only once compute times are there."""
        assert self.compute is not None
        inside, between = (self._link(crossing) for crossing in (False, True))
        return Machines(
            nodes=self.nodes,
            per_node=self.workers // self.nodes,
            compute=self.compute,
            inside=inside,
            between=between,
            costs=self.costs,
            tables=tuple(self.tables),
            parameters=self.parameters,
            memory_bytes=self.memory_bytes,
            source=f"gossamer probe, {time.strftime('%Y-%m-%d %H:%M')}" + (f"; {self.lost}" if self.lost else ""),
        )

    def _link(self, crossing: bool) -> Link:
        """Latency and bandwidth of a pair that was alone on its way."""
        found = [
            table
            for table in self.tables
            if table.kind == EXCHANGE and (table.shape.nodes > 1) == crossing and table.shape.at_once == 1
        ]
        if not found:
            return NOWHERE
        table = found[0]
        took = max(table.seconds[-1] - table.seconds[0], 1e-9)
        return Link((table.sizes_bytes[-1] - table.sizes_bytes[0]) / took, table.seconds[0])

    @property
    def words(self) -> str:
        """What there is, in words."""
        kinds = [kind for kind in (EXCHANGE, MEAN, GATHER) if any(table.kind == kind for table in self.tables)]
        parts = (["compute times"] if self.compute else []) + [f"{kind}s" for kind in kinds]
        return ", ".join(parts) or "nothing"


def compute_of(whole: list[list[float]], gradient: list[list[float]], backward_shares: list[float]) -> ComputeProfile:
    """From every worker's times to a typical worker's sample, everybody's factor, and how much they have in common."""
    medians = np.array([np.median(times) for times in whole])
    typical = float(np.median(medians))
    factors = medians / typical
    # Differences that are noise are none.
    factors = np.where(np.abs(factors - 1) < 0.05, 1.0, factors)
    scaled = [np.array(times) / factor for times, factor in zip(whole, factors, strict=True)]
    sample = np.sort(np.concatenate(scaled))
    if len(sample) > 200:
        sample = np.quantile(sample, (np.arange(200) + 0.5) / 200)
    backward = float(np.median([np.median(g) * share for g, share in zip(gradient, backward_shares, strict=True)]))
    return ComputeProfile(
        mean_s=float(sample.mean()),
        sample_s=tuple(float(f"{time:.5g}") for time in sample),
        factors=tuple(float(f"{factor:.4g}") for factor in factors) if (factors != 1).any() else (),
        correlation=round(correlation(scaled), 2),
        backward_s=backward,
    )


def correlation(times: list[np.ndarray]) -> float:
    """How strongly workers are slow in the same step, by ranks; 0 where nothing varies."""
    length = min(map(len, times))
    if len(times) < 2 or length < 8:
        return 0.0
    ranks = np.array([stats.rankdata(each[:length]) for each in times])
    if (ranks.std(axis=1) == 0).any():
        return 0.0
    found = np.corrcoef(ranks)
    return float(np.clip(found[np.triu_indices(len(times), 1)].mean(), 0.0, 1.0))
