"""The runtime model by running it: a method's own generators in the virtual cluster, in time only.

No gradients: workers only average, and their vectors are short stand-ins for the model's, with the messages' sizes
scaled up to it, so that memory does not depend on the model. Methods that have no closed form are predicted this way,
and the closed forms are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gossamer.config import resolve
from gossamer.hardware import HardwareConfig, Link
from gossamer.plan.closed_form import ELEMENT_BYTES, NUM_STEPS, NUM_WARM, Forecast, Scene
from gossamer.plan.comm_times import Times, Timing
from gossamer.plan.machines import Machines, Shape
from gossamer.virtual.sim.clock import Clock, HardwareClock, OnDone
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue
from gossamer.virtual.simulation import make_cluster

STAND_IN = 4096
"""Parameters of a virtual worker at most."""


class MachineClock:
    """The virtual cluster's clock for machines that were measured."""

    instantaneous = False

    def __init__(self, machines: Machines, free: bool, queue: EventQueue) -> None:
        self.machines, self.free, self.queue = machines, free, queue
        self.times = Times(machines)
        self.factors = machines.compute.worker_factors(machines.workers)
        self._busy = [0] * machines.nodes
        """Groups at work on each node."""

    def gradient_times(self, rank: int, rng: np.random.Generator) -> Iterator[float]:
        while True:
            typical = self.machines.compute.draw(rng, (NUM_STEPS, 1))[:, 0] / self.factors[0]
            yield from (typical * self.factors[rank]).tolist()

    def mean_gradient_time(self, rank: int) -> float:
        return float(self.machines.compute.mean_s * self.factors[rank])

    def swap(self, now: float, a: int, b: int, size_bytes: int, done: OnDone) -> None:
        self._hold(now, self.times.exchange, (a, b), size_bytes, done)

    def mean(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        self._hold(now, self.times.mean, members, size_bytes, done)

    def gather(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        self._hold(now, self.times.gather, members, size_bytes, done)

    def _hold(self, now: float, time: Any, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        nodes = sorted({rank // self.machines.per_node for rank in members})
        for node in nodes:
            self._busy[node] += 1
        shape = Shape(len(members), len(nodes), max(self._busy[node] for node in nodes))
        timing: Timing = Timing() if self.free else time(shape, size_bytes).after(self.machines.compute.mean_s)

        def over(moment: float) -> None:
            for node in nodes:
                self._busy[node] -= 1
            done(moment)

        self.queue.schedule(now + timing.seconds, MESSAGE, over)


class Scaled:
    """A clock for messages that are so many times longer than they seem."""

    instantaneous = False

    def __init__(self, clock: Clock, scale: float) -> None:
        self.clock, self.scale = clock, scale
        self.gradient_times, self.mean_gradient_time = clock.gradient_times, clock.mean_gradient_time

    def swap(self, now: float, a: int, b: int, size_bytes: int, done: OnDone) -> None:
        self.clock.swap(now, a, b, round(size_bytes * self.scale), done)

    def mean(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        self.clock.mean(now, members, round(size_bytes * self.scale), done)

    def gather(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        self.clock.gather(now, members, round(size_bytes * self.scale), done)


def cluster_of(scene: Scene, method: str, topology: str, options: Mapping[str, Any], free: bool = False) -> Cluster:
    """The virtual cluster that stands in for these machines, before its first step."""
    machines = scene.machines
    dim = min(scene.parameters, STAND_IN)
    described = hardware(machines)
    (run,) = resolve(
        {
            "task": "consensus", "dim": dim, "workers": scene.workers, "nodes": described.nodes, "seed": scene.seed,
            "method": method, "topology": topology, **options,
        }
    )  # fmt: skip

    def clock(queue: EventQueue) -> Clock:
        # Machines that were only described are the virtual cluster's own, with flows that share cards as they come.
        plain = not (machines.measured or machines.compute.sample_s or free)
        made: Clock = HardwareClock(described, scene.workers, queue) if plain else MachineClock(machines, free, queue)
        return Scaled(made, scene.parameters / dim)

    with torch.random.fork_rng(devices=[]):
        return make_cluster(run, make_clock=clock)


def hardware(machines: Machines) -> HardwareConfig:
    """The machines as the options of ``gossamer simulate`` describe them."""
    compute = machines.compute
    slow = enumerate(compute.worker_factors(machines.workers))
    return HardwareConfig(
        compute=f"lognormal:{compute.mean_s}s,{compute.spread}" if compute.spread else f"constant:{compute.mean_s}s",
        straggler=",".join(f"{rank}:{factor}" for rank, factor in slow if factor != 1),
        nodes=machines.nodes,
        link=_text(machines.between),
        node_link=_text(machines.inside),
    )


def _text(link: Link) -> str:
    return f"{'inf' if math.isinf(link.bytes_per_s) else f'{link.bytes_per_s}b'}/{link.latency_s}s"


def run(cluster: Cluster, steps: int) -> float:
    """Let every worker make so many steps on average; returns the time."""
    while cluster.total_steps < steps * cluster.num_workers and cluster.advance():
        pass
    return cluster.queue.now


def forecast(scene: Scene, method: str, topology: str, options: Mapping[str, Any]) -> Forecast:
    """A method's forecast by running it once."""
    cluster = cluster_of(scene, method, topology, options)
    apart = cluster.consensus()
    warm = run(cluster, NUM_WARM)
    sent = sum(worker.bytes_sent for worker in cluster.workers)
    taken = run(cluster, NUM_STEPS) - warm
    steps = NUM_STEPS - NUM_WARM
    free = cluster_of(scene, method, topology, options, free=True)
    free_s = (-run(free, NUM_WARM) + run(free, NUM_STEPS)) / steps
    kept = (cluster.consensus() / apart) ** (1 / NUM_STEPS) if apart > 0 else 0.0
    vectors = sum(row.numel() for row in cluster.workers[0].vectors.values()) / cluster.evaluator.flat.size
    scale = scene.size_bytes / (ELEMENT_BYTES * cluster.evaluator.flat.size)
    bytes_sent = sum(worker.bytes_sent for worker in cluster.workers) - sent
    return Forecast(
        step_s=np.array([taken / steps]),
        free_s=np.array([free_s]),
        timing=scene.times.mean(scene.everybody(), scene.size_bytes),
        bytes_per_step=bytes_sent * scale / steps / scene.workers,
        disagreement=1 / max(1e-9, 1 - min(kept, 1.0) ** 2),
        memory_vectors=vectors,
    )
