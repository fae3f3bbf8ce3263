"""Failures and joins: workers die and join at the simulated times that the hardware description gives.

A worker that joins copies the state of a peer between two steps of that peer, when the peer takes part in nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from gossamer.errors import InputError
from gossamer.hardware import HardwareConfig, parse_ranked
from gossamer.methods import Method
from gossamer.virtual.sim.event_queue import MESSAGE
from gossamer.virtual.sim.method_driver import MethodDriver, OnWorker
from gossamer.virtual.sim.replicas import Replicas
from gossamer.virtual.sim.virtual_worker import VirtualWorker


class Lifecycle:
    def __init__(
        self,
        method: Method,
        driver: MethodDriver,
        replicas: Replicas,
        start: OnWorker,
        record_event: Callable[[str], None],
    ) -> None:
        """``start(worker)`` lets a worker train from now on, ``record_event(text)`` reports what happened."""
        self.method, self.driver, self.replicas = method, driver, replicas
        self.workers, self.queue, self.recorder = driver.workers, driver.queue, driver.recorder
        self.start, self.record_event = start, record_event
        self.joining: list[tuple[VirtualWorker, VirtualWorker]] = []
        """Workers that join when their peer has finished its step, each with that peer."""

    def begin(self, hardware: HardwareConfig) -> None:
        """Schedule all failures and joins, and start the workers that are alive from the beginning."""
        fails = parse_ranked(hardware.fail, "@", "--fail", len(self.workers))
        joins = parse_ranked(hardware.join, "@", "--join", len(self.workers))
        for rank, time in joins:
            if all(failed != rank or when > time for failed, when in fails):
                self.workers[rank].alive = False
                if self.recorder is not None:
                    self.recorder.left(rank, 0.0)
        for rank, time in fails:
            self.queue.schedule(time, MESSAGE, self._fail, rank)
        for rank, time in joins:
            self.queue.schedule(time, MESSAGE, self._join, rank)
        if not any(worker.alive for worker in self.workers):
            raise InputError("--join names every worker: expected at least one that trains from the start")
        self.driver.deadlocks.on_membership_change()
        for worker in self.workers:
            if worker.alive:
                self._start(worker)

    def _start(self, worker: VirtualWorker) -> None:
        worker.alive_since = self.queue.now
        if self.recorder is not None:
            self.recorder.joined(worker.rank, worker.alive_since)
        self.method.begin(worker)
        self.start(worker)

    def _fail(self, now: float, rank: int) -> None:
        worker = self.workers[rank]
        if not worker.alive:
            return
        worker.alive = False
        worker.gradient_id += 1
        worker.past_lifetime += now - worker.alive_since
        self.record_event(f"worker {rank} gone at {now:g}; going on with {sum(w.alive for w in self.workers)}")
        if self.recorder is not None:
            self.recorder.left(rank, now)
        self.driver.close(worker)
        worker.tickets.clear()
        if worker.idle_since is not None:
            worker.idle_time += now - worker.idle_since
            worker.idle_since = None
        self.driver.pairing.remove(rank)
        without_peer = [joiner for joiner, peer in self.joining if peer is worker]
        self.joining = [pair for pair in self.joining if pair[1] is not worker]
        for joiner in without_peer:
            self._join(now, joiner.rank)
        self.driver.remove(rank)

    def _join(self, now: float, rank: int) -> None:
        worker = self.workers[rank]
        alive = [other for other in self.workers if other.alive]
        if worker.alive or not alive:
            return
        neighbours = [self.workers[other] for other in worker.topology.neighbours(rank) if self.workers[other].alive]
        peer = (neighbours or alive)[0]
        if peer.idle_since is None:
            self._copy_state(worker, peer)
        else:
            self.joining.append((worker, peer))

    def join_after_step(self, peer: VirtualWorker) -> None:
        """Join the workers that wait for the end of the step of ``peer``."""
        for joiner, waits_for in self.joining:
            if waits_for is peer and not joiner.alive:
                self._copy_state(joiner, peer)
        self.joining = [pair for pair in self.joining if pair[1] is not peer]

    def _copy_state(self, worker: VirtualWorker, peer: VirtualWorker) -> None:
        if self.driver.exchanges.encoding is not None:
            self.driver.exchanges.encoding.forget(worker.rank)
        worker.x.copy_(peer.x)
        worker.scalars = {name: peer.scalars[name] for name in self.method.shared if name in peer.scalars}
        for row in worker.vectors.values():
            row.mul_(0.0)
        for name in self.method.shared:
            if name in peer.vectors:
                worker.vector(name, len(peer.vectors[name])).copy_(peer.vectors[name])
        worker.tickets = {name: ticket for name, ticket in peer.tickets.items() if name in self.method.shared}
        worker.last_rounds, worker.own_last_rounds = dict(peer.last_rounds), {}
        worker.step = peer.step
        worker.alive = True
        self.replicas.copy_local_state(worker.rank, peer.rank, optimizer_state=self.method.lockstep)
        self.driver.exchanges.rendezvous.on_membership_change()
        self.record_event(f"worker {worker.rank} joined at {self.queue.now:g} with the weights of worker {peer.rank}")
        self.driver.deadlocks.on_membership_change()
        self._start(worker)
