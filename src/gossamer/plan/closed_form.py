"""The runtime model in closed form: how long a step takes, with no event simulated.

With ``C_i(k)`` the compute time of worker i's step k and ``T`` that of a communication::

    all-reduce       F(k)   = max_i (F(k−1) + C_i(k)) + T
    local SGD        F(mH)  = max_i (F((m−1)H) + Σ_h C_i) + T
    overlapped       F_i(k) = max( F_i(k−1) + C_i(k),  max_{j in G_i(k−1)} F_j(k−1) + T_G(k−1) )
    divisible        F(k)   = max_i (F(k−1) + C_i(k)) + T_foreground, and waits for a background that shares the cards
    LASGD, gossip    nobody waits: the mean pace of the workers

It is the virtual cluster computed a second way, in arrays over runs and workers, and tested against it. A method that
has no form here is predicted by running it (``replay``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gossamer import compress
from gossamer.methods import MethodConfig
from gossamer.methods.divisible import DivisibleConfig
from gossamer.methods.gossip import GossipConfig
from gossamer.methods.lasgd import LASGDConfig
from gossamer.methods.localsgd import LocalSGDConfig
from gossamer.methods.overlap import OverlapConfig
from gossamer.plan import disagreement
from gossamer.plan.comm_times import Times, Timing
from gossamer.plan.machines import Machines, Shape, shapes
from gossamer.seeds import stream
from gossamer.topology import Topology

NUM_STEPS = 96
NUM_WARM = 32
"""Steps of an overlapped run that are not counted: its workers start side by side and fall out of step."""
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Forecast:
    """What one way of training comes to, one entry per simulated run."""

    step_s: np.ndarray
    free_s: np.ndarray
    """The same if communication took no time."""
    timing: Timing
    """Of the communication that matters most."""
    bytes_per_step: float
    disagreement: float
    """V; see ``disagreement``."""
    memory_vectors: float
    """Extra memory, in vectors as long as the parameters."""
    late_steps: float = 0.0
    """How many steps late most of a gradient takes effect, where models are kept alike at that price."""


@dataclass(frozen=True)
class Scene:
    """The machines, the model's size, and the compute times that all forecasts share."""

    machines: Machines
    parameters: int
    seed: int = 0
    num_runs: int = 8
    times: Times = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", Times(self.machines))

    @property
    def workers(self) -> int:
        return self.machines.workers

    @property
    def size_bytes(self) -> int:
        return ELEMENT_BYTES * self.parameters

    @cached_property
    def compute(self) -> np.ndarray:
        """ComputeProfile times [steps, runs, workers]."""
        return self.draw(NUM_STEPS)

    @cached_property
    def usual_s(self) -> float:
        """What a step's compute takes on average over workers."""
        return float(self.compute.mean())

    def draw(self, num_steps: int) -> np.ndarray:
        rng = stream(self.seed, "plan", self.workers)
        return self.machines.compute.draw(rng, (num_steps, self.num_runs, self.workers))

    @cached_property
    def luck(self) -> np.ndarray:
        """One standard normal number per run, for what varies from run to run."""
        return stream(self.seed, "luck").standard_normal(self.num_runs)

    def everybody(self) -> Shape:
        return Shape(self.workers, self.machines.nodes, 1)

    def per_run(self, timing: Timing) -> np.ndarray:
        """A communication's time in each run, on average over its messages."""
        return timing.seconds * _varied(timing.spread, self.luck)

    def passes(self, count: float) -> float:
        """Seconds of so many passes over the parameters, and what every step costs."""
        return count * self.size_bytes / self.machines.costs.mixing_bytes_per_s + self.machines.costs.overhead_s

    def slowed(self, compute: np.ndarray, under_way_s: np.ndarray | float) -> np.ndarray:
        """ComputeProfile times while a message is under way for that long from their start."""
        slowdown = self.machines.costs.slowdown
        slower: np.ndarray = compute + np.minimum(under_way_s, compute * slowdown) * (1 - 1 / slowdown)
        return slower


def allreduce(scene: Scene, topology: Topology, config: MethodConfig) -> Forecast:
    timing = scene.times.mean(scene.everybody(), scene.size_bytes).after(scene.usual_s)
    free = scene.compute.max(axis=-1).mean(axis=0) + scene.passes(2)
    return Forecast(
        step_s=free + scene.per_run(timing),
        free_s=free,
        timing=timing,
        bytes_per_step=_ring_bytes(scene.workers, scene.size_bytes),
        disagreement=1.0,
        memory_vectors=2,
    )


def localsgd(scene: Scene, topology: Topology, config: LocalSGDConfig) -> Forecast:
    period = config.period
    blocks = math.ceil(NUM_STEPS / period)
    compute = scene.draw(blocks * period) + scene.passes(0)
    together = compute.reshape(blocks, period, scene.num_runs, scene.workers).sum(axis=1).max(axis=-1).mean(axis=0)
    timing = scene.times.mean(scene.everybody(), scene.size_bytes).after(period * scene.usual_s)
    free = (together + scene.passes(1) - scene.passes(0)) / period
    return Forecast(
        step_s=free + scene.per_run(timing) / period,
        free_s=free,
        timing=timing,
        bytes_per_step=_ring_bytes(scene.workers, scene.size_bytes) / period,
        disagreement=disagreement.of_period(period),
        memory_vectors=1,
    )


def overlap(scene: Scene, topology: Topology, config: OverlapConfig) -> Forecast:
    rounds = [ForecastRound(scene, [group.members for group in groups]) for groups in topology.rounds]
    everybody = ForecastRound(scene, [tuple(range(scene.workers))] if scene.workers > 1 else [])
    every = config.global_every
    luck = scene.luck
    schedule = [everybody if every and (k + 1) % every == 0 else rounds[k % len(rounds)] for k in range(NUM_STEPS)]
    used = schedule[: max(len(rounds), every)] if len(rounds) <= NUM_STEPS else rounds
    cost = scene.passes(2)

    def finish(free: bool) -> np.ndarray:
        at = np.zeros((scene.num_runs, scene.workers))
        warm = np.zeros(scene.num_runs)
        mixed = np.full_like(at, -np.inf)
        under_way = np.zeros_like(at)
        for k in range(NUM_STEPS):
            compute = scene.compute[k] if free else scene.slowed(scene.compute[k], under_way)
            at = np.maximum(at + compute, mixed) + cost
            mixed, under_way = schedule[k].finish(at, luck, free)
            if k + 1 == NUM_WARM:
                warm = at.max(axis=1)
        # The slowest worker's pace: sooner or later everybody's.
        pace: np.ndarray = (at.max(axis=1) - warm) / (NUM_STEPS - NUM_WARM)
        return pace

    slowest = max((timing for each in used for timing in each.timings), key=lambda each: each.seconds, default=Timing())
    total = disagreement.of_schedule(topology)
    return Forecast(
        step_s=finish(free=False),
        free_s=finish(free=True),
        timing=slowest,
        bytes_per_step=sum(each.bytes_per_worker for each in used) / len(used),
        disagreement=total,
        memory_vectors=1,
    )


class ForecastRound:
    """One round of group means, over finish times [runs, workers]."""

    def __init__(self, scene: Scene, groups: list[tuple[int, ...]]) -> None:
        made = shapes(groups, scene.machines.per_node)
        in_a_row = {shape: scene.times.mean(shape, scene.size_bytes) for shape in dict.fromkeys(made)}
        known = {shape: timing.after(scene.usual_s - timing.seconds) for shape, timing in in_a_row.items()}
        self.timings = list(known.values())
        sizes = [len(members) for members in groups]
        self._members = np.array([rank for members in groups for rank in members], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if groups else np.zeros(0, int)
        self._sizes = np.array(sizes, dtype=np.int64)
        self._seconds = np.array([known[shape].seconds for shape in made])
        self._spread = np.array([known[shape].spread for shape in made])
        self.bytes_per_worker = sum(2 * (size - 1) for size in sizes) * scene.size_bytes / scene.workers

    def finish(self, at: np.ndarray, luck: np.ndarray, free: bool) -> tuple[np.ndarray, np.ndarray]:
        """When each worker has its group's mean, and for how long its message is under way."""
        mixed = np.full_like(at, -np.inf)
        under_way = np.zeros_like(at)
        if len(self._members):
            last = np.maximum.reduceat(at[:, self._members], self._starts, axis=1)
            took = self._seconds * _varied(self._spread, luck[:, None]) * (not free)
            arrived = np.repeat(last + took, self._sizes, axis=1)
            mixed[:, self._members] = arrived
            under_way[:, self._members] = np.repeat(np.broadcast_to(took, last.shape), self._sizes, axis=1)
        return mixed, under_way


def divisible(scene: Scene, topology: Topology, config: DivisibleConfig) -> Forecast:
    compressor = compress.make(config.compressor, config.ratio)
    message = compressor.size_bytes(scene.parameters)
    summed = config.compressor in ("randomblock", "lowrank", "none")
    everybody, times = scene.everybody(), scene.times
    front = (times.mean(everybody, message) if summed else times.gather(everybody, message)).after(scene.usual_s)
    late = None if summed else times.late_gather(everybody, message)
    back = times.mean(everybody, 2 * scene.size_bytes + ELEMENT_BYTES)
    period = config.period
    delay = period if config.delay < 0 else config.delay
    cost = scene.passes(8) + scene.size_bytes / scene.machines.costs.compressing_bytes_per_s
    slowest = scene.compute.max(axis=-1) + cost

    def finish(free: bool) -> np.ndarray:
        luck = _varied(front.spread, scene.luck) * (not free)
        at = np.zeros(scene.num_runs)
        warm = np.zeros(scene.num_runs)
        left = np.zeros(scene.num_runs)
        """Seconds of the background message that are still to be transferred."""
        merge_at = -1
        count = max(1, NUM_WARM // period) * period
        for k in range(NUM_STEPS):
            busy = left > 0
            compute = np.where(busy, scene.slowed(slowest[k], left), slowest[k])
            left = np.maximum(0.0, left - compute)
            if late is None:
                # Both share the cards: what is left of the background takes its half until one of them is done.
                transfer = front.transfer_s * luck
                shared = np.minimum(left, transfer)
                sent = transfer + shared + front.latency_s * luck
                left = np.maximum(0.0, left - shared - front.latency_s * luck)
            else:
                # Behind the background's queues for as long as there is one.
                behind = np.minimum(1.0, left / late.seconds) * max(0.0, late.seconds - front.seconds)
                sent = (front.seconds + behind) * luck
                left = np.maximum(0.0, left - sent)
            at = at + compute + sent
            if k == merge_at:
                waited = np.where(left > 0, left + back.latency_s * luck, 0.0)
                at, left, merge_at = at + waited, np.zeros_like(left), -1
            if k % period == 0 and merge_at < 0:
                left, merge_at = back.transfer_s * luck, k + delay
                if delay == 0:
                    at, left, merge_at = at + back.seconds * luck, np.zeros_like(left), -1
            if k + 1 == count:
                warm = at
        pace: np.ndarray = (at - warm) / (NUM_STEPS - count)
        return pace

    share = _ring_bytes(scene.workers, message) if summed else (scene.workers - 1) * message
    return Forecast(
        step_s=finish(free=False),
        free_s=finish(free=True),
        timing=max(front, Timing(back.latency_s / period, back.transfer_s / period), key=lambda each: each.seconds)
        if back.seconds
        else front,
        bytes_per_step=share + _ring_bytes(scene.workers, 2 * scene.size_bytes + ELEMENT_BYTES) / period,
        disagreement=1.0,
        memory_vectors=10,
        late_steps=(1 - 1 / config.ratio) * disagreement.of_period(period, delay),
    )


def lasgd(scene: Scene, topology: Topology, config: LASGDConfig) -> Forecast:
    timing = scene.times.mean(scene.everybody(), scene.size_bytes).after(config.period * scene.usual_s)
    own = scene.compute.mean(axis=0) + scene.passes(2)
    # From one merge to the next: the steps of the slowest worker, then the average.
    cycle = config.period * own.max(axis=1) + timing.seconds
    under_way = timing.seconds / np.maximum(cycle, 1e-12)
    step = _pace(_beside(scene, own, under_way[:, None]))
    steps_per_cycle = float(np.mean(np.maximum(cycle, step) / step))
    delay = float(np.mean(timing.seconds / step))
    return Forecast(
        step_s=step,
        free_s=_pace(own),
        timing=timing,
        bytes_per_step=_ring_bytes(scene.workers, scene.size_bytes) / steps_per_cycle,
        disagreement=disagreement.of_period(steps_per_cycle, delay),
        memory_vectors=3,
    )


def gossip(scene: Scene, topology: Topology, config: GossipConfig, accelerated: bool = False) -> Forecast:
    own = scene.compute.mean(axis=0) + scene.passes(2)
    free = _pace(own)
    in_a_row = _slowest_exchange(scene, topology)
    timing = in_a_row.after(scene.usual_s / config.rate - in_a_row.seconds)
    rate = _achieved(config.rate, float(free.mean()), timing.seconds, topology)
    # Whoever finds no partner is waited for by others: links are as busy as was asked for.
    under_way = min(1.0, config.rate * timing.seconds / float(free.mean()))
    return Forecast(
        step_s=_pace(_beside(scene, own, under_way)),
        free_s=free,
        timing=timing,
        bytes_per_step=rate * scene.size_bytes,
        disagreement=disagreement.of_gossip(topology, rate, accelerated),
        memory_vectors=4 if accelerated else 3,
    )


def a2cid2(scene: Scene, topology: Topology, config: GossipConfig) -> Forecast:
    return gossip(scene, topology, config, accelerated=True)


def _beside(scene: Scene, own: np.ndarray, under_way: np.ndarray | float) -> np.ndarray:
    """Steps of workers that do not wait, with messages under way for that share of the time."""
    slower: np.ndarray = own * (1 + under_way * (scene.machines.costs.slowdown - 1))
    return slower


def _slowest_exchange(scene: Scene, topology: Topology) -> Timing:
    """An exchange over the slowest kind of link there is in the graph, with every worker in one."""
    if scene.workers == 1:
        return Timing()
    per_node = scene.machines.per_node
    nodes = topology.edges // per_node
    rates = topology.rates()
    crossing = float(rates[nodes[:, 0] != nodes[:, 1]].sum() / rates.sum())
    if crossing:
        return scene.times.exchange(Shape(2, 2, max(1, round(crossing * per_node))), scene.size_bytes)
    return scene.times.exchange(Shape(2, 1, max(1, per_node // 2)), scene.size_bytes)


def _achieved(wanted: float, step_s: float, exchange_s: float, topology: Topology) -> float:
    """Exchanges per step that a worker gets to: it is in one at a time, and its neighbours may all be in others.

    With d neighbours it is left about d/(d + 2) of the time that it would have (fitted to the virtual cluster).
    """
    if topology.workers == 1:
        return 0.0
    if exchange_s == 0:
        return wanted
    degree = float(topology.degrees.mean())
    most = degree / (degree + 2) * step_s / exchange_s
    return float((wanted**-4 + most**-4) ** -0.25)


def _varied(spread: Any, luck: np.ndarray) -> np.ndarray:
    """A factor of mean 1 on a run's messages, which vary by ``spread`` one by one."""
    of_mean = spread / math.sqrt(NUM_STEPS)
    varied: np.ndarray = np.exp(of_mean * (luck - of_mean / 2))
    return varied


def _pace(own: np.ndarray) -> np.ndarray:
    """Time in which workers that do not wait make one step each on average."""
    pace: np.ndarray = own.shape[1] / (1.0 / own).sum(axis=1)
    return pace


def _ring_bytes(members: int, size_bytes: float) -> float:
    return 2 * (members - 1) / members * size_bytes


FORMS: dict[str, Callable[..., Forecast]] = {
    "allreduce": allreduce,
    "localsgd": localsgd,
    "overlap": overlap,
    "divisible": divisible,
    "lasgd": lasgd,
    "gossip": gossip,
    "a2cid2": a2cid2,
}
