"""The runtime model by running it: a method's own generators in the virtual cluster, in time only.

It predicts methods that have no closed form, and the closed forms are tested against it. No gradients are computed, the
workers only average. Their vectors are short, and message sizes are scaled up to the model's, so memory does not depend
on the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gossamer.config import resolve
from gossamer.hardware import HardwareConfig, Link
from gossamer.methods import find
from gossamer.methods.loading.method_contract import is_encodable
from gossamer.plan.cluster_spec import ELEMENT_BYTES, EXCHANGE, GATHER, MEAN, ClusterSpec, GroupShape
from gossamer.plan.runtime_model.closed_form import slowest_exchange
from gossamer.plan.runtime_model.cluster_model import (
    NUM_STEPS,
    NUM_WARM_UP_STEPS,
    ClusterModel,
    Forecast,
)
from gossamer.plan.runtime_model.comm_times import CommTimes
from gossamer.topology.disagreement import accumulated_noise, contraction_of
from gossamer.virtual.sim.clock import Clock, HardwareClock, OnDone
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.sim.event_queue import MESSAGE, EventQueue

MAX_PARAMETERS = 4096
"""Of a virtual worker."""


class MeasuredClock:
    """The virtual cluster's clock, with the measured times of a cluster; without ``with_comm``, messages take none."""

    instantaneous = False

    def __init__(self, spec: ClusterSpec, with_comm: bool, queue: EventQueue, inner_s: float = 0.0) -> None:
        """``inner_s``: how long a step waits for what the ranks of a replica send each other."""
        self.spec, self.with_comm, self.queue, self.inner_s = spec, with_comm, queue, inner_s
        self.comm = CommTimes(spec)
        self.factors = spec.compute.worker_factors(spec.ranks)
        self._num_groups = [0] * spec.nodes
        """Groups that communicate on each node now."""

    def gradient_times(self, rank: int, rng: np.random.Generator) -> Iterator[float]:
        while True:
            ranks = 1 if self.spec.replica is None else self.spec.replica.ranks
            drawn = self.spec.compute.draw(rng, (NUM_STEPS, ranks)) / self.factors[:ranks]
            own = self.factors[rank * ranks : (rank + 1) * ranks]
            yield from ((drawn * own).max(axis=1) + self.inner_s).tolist()

    def mean_gradient_time(self, rank: int) -> float:
        ranks = self.spec.ranks // self.spec.workers
        slowest = self.factors[rank * ranks : (rank + 1) * ranks].max()
        return float(self.spec.compute.mean_s * slowest) + self.inner_s

    def swap(self, now: float, a: int, b: int, size_bytes: int, done: OnDone) -> None:
        self._communicate(EXCHANGE, now, (a, b), size_bytes, done)

    def shift(self, now: float, source: int, to: int, size_bytes: int, done: OnDone) -> None:
        self._communicate(EXCHANGE, now, (source, to), size_bytes, done)

    def mean(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        self._communicate(MEAN, now, members, size_bytes, done)

    def gather(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        self._communicate(GATHER, now, members, size_bytes, done)

    def _communicate(self, kind: str, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        nodes = sorted({rank // self.spec.per_node for rank in members})
        for node in nodes:
            self._num_groups[node] += 1
        shape = GroupShape(len(members), len(nodes), max(self._num_groups[node] for node in nodes))
        seconds = 0.0
        if self.with_comm:
            seconds = self.comm.time(kind, shape, size_bytes).after_pause(self.spec.compute.mean_s).seconds

        def end(time: float) -> None:
            for node in nodes:
                self._num_groups[node] -= 1
            done(time)

        self.queue.schedule(now + seconds, MESSAGE, end)


class ScaledClock:
    """A clock that takes messages to be ``scale`` times longer than they are."""

    instantaneous = False

    def __init__(self, clock: Clock, scale: float) -> None:
        self.clock, self.scale = clock, scale
        self.gradient_times, self.mean_gradient_time = clock.gradient_times, clock.mean_gradient_time

    def swap(self, now: float, a: int, b: int, size_bytes: int, done: OnDone) -> None:
        self.clock.swap(now, a, b, round(size_bytes * self.scale), done)

    def shift(self, now: float, source: int, to: int, size_bytes: int, done: OnDone) -> None:
        self.clock.shift(now, source, to, round(size_bytes * self.scale), done)

    def mean(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        self.clock.mean(now, members, round(size_bytes * self.scale), done)

    def gather(self, now: float, members: tuple[int, ...], size_bytes: int, done: OnDone) -> None:
        self.clock.gather(now, members, round(size_bytes * self.scale), done)


def virtual_cluster(
    model: ClusterModel, method: str, topology: str, options: Mapping[str, Any], with_comm: bool = True
) -> Cluster:
    """Return a virtual cluster with the times of ``model``, before its first step."""
    spec = model.spec
    dim = min(model.parameters, MAX_PARAMETERS)
    hardware = hardware_config(spec)
    wire = {"wire": model.wire} if is_encodable(find(method)) else {}
    (run,) = resolve(
        {
            "task": "consensus", "dim": dim, "workers": model.workers, "nodes": hardware.nodes, "seed": model.seed,
            "method": method, "topology": topology, **options, **wire,
        }
    )  # fmt: skip

    def make_clock(queue: EventQueue) -> Clock:
        # Without measurements, the virtual cluster's own clock knows better how concurrent messages share a card.
        clock: Clock = HardwareClock(hardware, model.workers, queue, spec.replica, model.model_bytes)
        if spec.measured or spec.compute.sample_s or not with_comm:
            clock = MeasuredClock(spec, with_comm, queue, model.inner_s)
        return ScaledClock(clock, model.parameters / dim)

    with torch.random.fork_rng(devices=[]):
        return Cluster(run, make_clock=make_clock)


def hardware_config(spec: ClusterSpec) -> HardwareConfig:
    compute = spec.compute
    # A replica is as slow as its slowest rank.
    factors = enumerate(compute.worker_factors(spec.ranks).reshape(spec.workers, -1).max(axis=1))
    return HardwareConfig(
        compute=f"lognormal:{compute.mean_s}s,{compute.spread}" if compute.spread else f"constant:{compute.mean_s}s",
        straggler=",".join(f"{rank}:{factor}" for rank, factor in factors if factor != 1),
        nodes=spec.nodes,
        link=_link_text(spec.between),
        node_link=_link_text(spec.inside),
    )


def _link_text(link: Link) -> str:
    return f"{'inf' if math.isinf(link.bytes_per_s) else f'{link.bytes_per_s}b'}/{link.latency_s}s"


def run(cluster: Cluster, steps: int) -> float:
    """Run until workers have done this many steps on average; return the simulated time."""
    while cluster.total_steps < steps * cluster.num_workers and cluster.advance():
        pass
    return cluster.queue.now


def forecast(model: ClusterModel, method: str, topology: str, options: Mapping[str, Any]) -> Forecast:
    """Predict a method by running it once with communication and once without."""
    cluster = virtual_cluster(model, method, topology, options)
    num_steps = NUM_STEPS - NUM_WARM_UP_STEPS
    initial = cluster.consensus()
    decay, times, bytes_sent = [], [], []
    for step in range(1, NUM_STEPS + 1):
        times.append(run(cluster, step))
        bytes_sent.append(sum(worker.bytes_sent for worker in cluster.workers))
        decay.append((cluster.consensus() / initial) ** 2 if initial > 0 else 0.0)
    without_comm = virtual_cluster(model, method, topology, options, with_comm=False)
    no_comm_s = -run(without_comm, NUM_WARM_UP_STEPS) + run(without_comm, NUM_STEPS)
    own = cluster.method
    if own.pairwise:
        comm = slowest_exchange(model, own.topology)
    else:
        comm = model.comm.time(MEAN, model.all_workers, model.sent_bytes if own.sends_models else model.model_bytes)
    vectors = sum(row.numel() for row in cluster.workers[0].vectors.values()) / cluster.evaluator.flat.size
    # Besides its vectors: what arrives, and with a background part also a snapshot and a second copy of the weights;
    # gradients that travel need a flat copy.
    vectors += (1 if own.background is None else 3) + (not own.sends_models)
    scale = model.model_bytes / (ELEMENT_BYTES * cluster.evaluator.flat.size)
    sent = bytes_sent[-1] - bytes_sent[NUM_WARM_UP_STEPS - 1]
    return Forecast(
        step_s=np.array([(times[-1] - times[NUM_WARM_UP_STEPS - 1]) / num_steps]),
        no_comm_step_s=np.array([no_comm_s / num_steps]),
        dominant_comm=comm,
        bytes_per_step=sent * scale / num_steps / model.workers,
        contraction=contraction_of(accumulated_noise(decay)),
        memory_vectors=vectors,
    )
