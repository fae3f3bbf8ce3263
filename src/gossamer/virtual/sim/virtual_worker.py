"""A virtual worker: what its method sees of it, and what the cluster keeps about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gossamer.effects import MethodGenerator, Ticket
from gossamer.seeds import exponentials, stream
from gossamer.topology import Topology
from gossamer.virtual.compute.rows import Row

if TYPE_CHECKING:
    from gossamer.virtual.sim.cluster import Cluster


class Coroutine:
    """One running generator of a worker: its step, its background, or its finish."""

    __slots__ = ("generator", "name", "over", "worker")

    def __init__(self, worker: VirtualWorker, name: str, generator: MethodGenerator) -> None:
        self.worker, self.name, self.generator, self.over = worker, name, generator, False

    def close(self) -> None:
        self.over = True
        self.generator.close()


class VirtualWorker:
    """One worker of the virtual cluster (a ``gossamer.worker.Worker``)."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self._cluster = cluster
        self.rank = rank
        self.topology: Topology = cluster.topology
        self.num_workers = cluster.num_workers
        self.seed = cluster.seed
        self.rng = stream(cluster.seed, "method", rank)
        self.gradient_times = cluster.clock.gradient_times(rank, stream(cluster.seed, "compute", rank))
        self.mean_gradient_time = cluster.clock.mean_gradient_time(rank)
        self.pairing_gaps = exponentials(stream(cluster.seed, "pairing", rank))
        self.x: Any = Row(cluster.tape, cluster.parameters.slots[rank])
        self.gradient: Any = Row(cluster.tape, cluster.gradients.slots[rank])
        self.alive = True
        self.turn = 0
        """Goes up with every gradient and every death: what was planned for an earlier turn does not happen."""
        self.step = 0
        self.steps_done = 0
        """Steps made by this worker itself; ``step`` also counts those a joining worker took over."""
        self.batches = 0
        """Mini-batches taken."""
        self.scalars: dict[str, float] = {}
        self.tickets: dict[str, Ticket] = {}
        self.vectors: dict[str, Row] = {}
        self.contributed: dict[str, int] = {}
        """The last round of each topic this worker took part in."""
        self.coroutines: list[Coroutine] = []
        self.sleeping: list[tuple[int, Coroutine]] = []
        """Strands that wait for a number of steps."""
        self.bytes_sent = 0
        self.exchanges = 0
        self.born = 0.0
        self.lived = 0.0
        self.compute_time = 0.0
        self.computed_in = 0.0
        """How long the newest gradient took."""
        self.idle_time = 0.0
        self.idle_since: float | None = None

    @property
    def time(self) -> float:
        return self._cluster.queue.now / self.mean_gradient_time

    def vector(self, name: str, size: int | None = None) -> Any:
        row = self.vectors.get(name)
        if row is None:
            row = self.vectors[name] = self._cluster.vector(name, size, self.rank)
        return row

    def optimizer_setting(self, name: str) -> Any:
        return self._cluster.optimizer_setting(name, self)

    def snapshot(self, write: Callable[[Any, Any], None] | None = None) -> Any:
        recorder = self._cluster.recorder
        if recorder is not None:
            recorder.snapshot(self.rank, self._cluster.queue.now, self._cluster.queue.now)
        if write is None:
            return self.x.clone()
        row = self.x.another()
        write(self, row)
        return row
