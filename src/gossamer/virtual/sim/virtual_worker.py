"""A virtual worker: what its method sees of it, and what the simulation keeps about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gossamer.effects import MethodGenerator, Ticket
from gossamer.recording import Recorder
from gossamer.seeds import exponentials, stream
from gossamer.topology import Topology
from gossamer.virtual.compute.rows import Row
from gossamer.virtual.sim.clock import Clock
from gossamer.virtual.sim.event_queue import EventQueue
from gossamer.virtual.sim.replicas import Replicas

if TYPE_CHECKING:
    from gossamer.virtual.comm.rendezvous import Rendezvous


class Coroutine:
    """One running generator of a worker's method: ``step``, ``background`` or ``finish``."""

    __slots__ = ("declared", "ended", "generator", "has_updated", "name", "waits_in", "worker")

    def __init__(self, worker: VirtualWorker, name: str, generator: MethodGenerator, declared: frozenset[type]) -> None:
        """``declared``: the effects that it may yield."""
        self.worker, self.name, self.generator, self.declared = worker, name, generator, declared
        self.ended = self.has_updated = False
        self.waits_in: Rendezvous | None = None
        """The collective whose answer it waits for."""

    def close(self) -> None:
        self.ended = True
        self.generator.close()


class VirtualWorker:
    """One worker of the virtual cluster (a ``gossamer.worker.Worker``). All times are simulated."""

    def __init__(
        self,
        rank: int,
        topology: Topology,
        seed: int,
        replicas: Replicas,
        clock: Clock,
        queue: EventQueue,
        recorder: Recorder | None,
    ) -> None:
        self.rank, self.topology, self.num_workers, self.seed = rank, topology, topology.workers, seed
        self._replicas, self._queue, self._recorder = replicas, queue, recorder
        self.rng = stream(seed, "method", rank)
        self.gradient_times = clock.gradient_times(rank, stream(seed, "compute", rank))
        self.mean_gradient_time = clock.mean_gradient_time(rank)
        self.pairing_gaps = exponentials(stream(seed, "pairing", rank))
        self.x: Any = Row(replicas.tape, replicas.parameters.slots[rank])
        self.gradient: Any = Row(replicas.tape, replicas.gradients.slots[rank])
        self.alive = True
        self.gradient_id = 0
        """Number of the gradient that is scheduled. A failure increments it too; events of an older one are stale."""
        self.step = 0
        self.steps_done = 0
        """Steps that this worker made itself. ``step`` also counts those that it took over when it joined."""
        self.batches = 0
        self.scalars: dict[str, float] = {}
        self.tickets: dict[str, Ticket] = {}
        self.vectors: dict[str, Row] = {}
        self.last_rounds: dict[str, int] = {}
        """The last round of each topic of collectives in which this worker took part, or its peer before it joined."""
        self.own_last_rounds: dict[str, tuple[int, tuple[int, ...] | None]] = {}
        """Those in which this worker took part itself since then, and the group."""
        self.paired_with: int | None = None
        """The peer that ``Pair`` has answered, until the worker swaps with it."""
        self.lost_peer: int | None = None
        """That peer, if it died since."""
        self.swap_ticket: Ticket | None = None
        """The ``Swap`` that was started and not waited for."""
        self.coroutines: list[Coroutine] = []
        self.waiting_for_steps: list[tuple[int, Coroutine]] = []
        """Coroutines that wait until ``step`` reaches a number."""
        self.bytes_sent = 0
        self.exchanges = 0
        self.alive_since = 0.0
        self.compute_time = 0.0
        self.gradient_time = 0.0
        self.idle_since: float | None = None
        """When the latest gradient ended, while the method's step is not over: the worker waits since then."""
        self.idle_time = 0.0
        """Time spent waiting, without the wait that is going on (``idle_until``)."""
        self.past_lifetime = 0.0
        """Time alive before the last failure (``lifetime_until``)."""

    @property
    def time(self) -> float:
        return self._queue.now / self.mean_gradient_time

    def add_gradient(self, vector: Any) -> None:
        vector.add_(self.gradient)

    def idle_until(self, now: float) -> float:
        return self.idle_time + (now - self.idle_since if self.idle_since is not None else 0.0)

    def lifetime_until(self, now: float) -> float:
        return self.past_lifetime + (now - self.alive_since if self.alive else 0.0)

    def vector(self, name: str, size: int | None = None) -> Any:
        row = self.vectors.get(name)
        if row is None:
            row = self.vectors[name] = self._replicas.vector(name, size, self.rank)
        return row

    def optimizer_setting(self, name: str) -> Any:
        return self._replicas.optimizer_setting(name, self.step)

    @property
    def offsets(self) -> tuple[int, ...]:
        return self._replicas.offsets

    def read_optimizer_state(self, name: str) -> Any:
        return self._replicas.read_optimizer_state(self.rank, name)

    def write_optimizer_state(self, name: str, value: Any) -> None:
        self._replicas.write_optimizer_state(self.rank, name, value)

    def snapshot(self, write: Callable[[Any, Any], None] | None = None) -> Any:
        if self._recorder is not None:
            self._recorder.snapshot(self.rank, self._queue.now, self._queue.now)
        if write is None:
            return self.x.clone()
        row = self.x.temporary()
        write(self, row)
        return row
