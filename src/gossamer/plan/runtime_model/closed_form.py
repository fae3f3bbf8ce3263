"""The runtime model in closed form: step times without simulating events.

With ``C_i(k)`` the compute time of worker i's step k and ``T`` that of a communication::

    all-reduce       F(k)   = max_i (F(k−1) + C_i(k)) + T
    local SGD        F(mH)  = max_i (F((m−1)H) + Σ_h C_i) + T
    overlapped       F_i(k) = max( F_i(k−1) + C_i(k),  max_{j in G_i(k−1)} F_j(k−1) + T_G(k−1) )
    divisible        F(k)   = max_i (F(k−1) + C_i(k)) + T_foreground, and waits for a background that shares the cards
    LASGD, gossip    no worker waits: the mean step time of the workers

These are the virtual cluster's rules, computed on arrays of runs and workers; the tests compare both. ``replay``
predicts a method that has no form here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gossamer.methods import Method
from gossamer.methods.a2cid2 import A2CiD2
from gossamer.methods.allreduce import AllReduce
from gossamer.methods.divisible import Divisible
from gossamer.methods.gossip import Gossip
from gossamer.methods.lasgd import LASGD
from gossamer.methods.localsgd import LocalSGD
from gossamer.methods.overlap import Overlap
from gossamer.plan.cluster_spec import (
    ELEMENT_BYTES,
    EXCHANGE,
    GATHER,
    GATHER_DURING_MEAN,
    MEAN,
    GroupShape,
    group_shapes,
)
from gossamer.plan.runtime_model.cluster_model import (
    NUM_STEPS,
    NUM_WARM_UP_STEPS,
    ClusterModel,
    Forecast,
    comm_factor,
)
from gossamer.plan.runtime_model.comm_times import CommTime
from gossamer.topology import Topology
from gossamer.topology.disagreement import periodic_contraction

SUMMED_COMPRESSORS = ("randomblock", "lowrank", "none")
"""Compressors whose messages are averaged by an all-reduce; those of the others are gathered."""


def allreduce(model: ClusterModel, method: AllReduce) -> Forecast:
    comm = model.comm.time(MEAN, model.all_workers, model.model_bytes).after_pause(model.mean_compute_s)
    no_comm_s = model.compute_s.max(axis=-1).mean(axis=0) + model.update_s(2)
    return Forecast(
        step_s=no_comm_s + model.comm_s(comm),
        no_comm_step_s=no_comm_s,
        dominant_comm=comm,
        bytes_per_step=_allreduce_bytes(model.workers, model.model_bytes),
        contraction=0.0,
        memory_vectors=2,
    )


def localsgd(model: ClusterModel, method: LocalSGD) -> Forecast:
    period = method.period
    blocks = math.ceil(NUM_STEPS / period)
    compute = model.draw_compute(blocks * period) + model.update_s(0)
    slowest = compute.reshape(blocks, period, model.num_runs, model.workers).sum(axis=1).max(axis=-1).mean(axis=0)
    comm = model.comm.time(MEAN, model.all_workers, model.sent_bytes).after_pause(period * model.mean_compute_s)
    no_comm_s = (slowest + model.update_s(1) - model.update_s(0)) / period
    return Forecast(
        step_s=no_comm_s + model.comm_s(comm) / period,
        no_comm_step_s=no_comm_s,
        dominant_comm=comm,
        bytes_per_step=_allreduce_bytes(model.workers, model.sent_bytes) / period,
        contraction=periodic_contraction(period),
        memory_vectors=1,
    )


def overlap(model: ClusterModel, method: Overlap) -> Forecast:
    rounds = [_GroupRound(model, [group.members for group in groups]) for groups in method.topology.rounds]
    everybody = _GroupRound(model, [tuple(range(model.workers))] if model.workers > 1 else [])
    every = method.global_every
    schedule = [everybody if every and (k + 1) % every == 0 else rounds[k % len(rounds)] for k in range(NUM_STEPS)]
    used = schedule[: max(len(rounds), every)] if len(rounds) <= NUM_STEPS else rounds
    update_s = model.update_s(2)

    def mean_step_s(with_comm: bool) -> np.ndarray:
        finished = np.zeros((model.num_runs, model.workers))
        warm_up_s = np.zeros(model.num_runs)
        mean_arrives = np.full_like(finished, -np.inf)
        in_flight_s = np.zeros_like(finished)
        for k in range(NUM_STEPS):
            compute = model.compute_s[k]
            if with_comm:
                compute = model.compute_during_comm(compute, in_flight_s)
            finished = np.maximum(finished + compute, mean_arrives) + update_s
            mean_arrives, in_flight_s = schedule[k].run(finished, model.comm_noise, with_comm)
            if k + 1 == NUM_WARM_UP_STEPS:
                warm_up_s = finished.max(axis=1)
        # The slowest worker's pace is in the end that of all.
        step_s: np.ndarray = (finished.max(axis=1) - warm_up_s) / (NUM_STEPS - NUM_WARM_UP_STEPS)
        return step_s

    return Forecast(
        step_s=mean_step_s(with_comm=True),
        no_comm_step_s=mean_step_s(with_comm=False),
        dominant_comm=_longest([comm for round in used for comm in round.comm_times]),
        bytes_per_step=sum(round.bytes_per_worker for round in used) / len(used),
        contraction=method.disagreement().contraction(),
        memory_vectors=1,
    )


class _GroupRound:
    """One round of group means, on arrays of times [runs, workers]."""

    def __init__(self, model: ClusterModel, groups: list[tuple[int, ...]]) -> None:
        shapes = group_shapes(groups, model.spec.per_node)
        back_to_back = {shape: model.comm.time(MEAN, shape, model.sent_bytes) for shape in dict.fromkeys(shapes)}
        comm = {shape: time.after_pause(model.mean_compute_s - time.seconds) for shape, time in back_to_back.items()}
        self.comm_times = list(comm.values())
        sizes = [len(members) for members in groups]
        self._members = np.array([rank for members in groups for rank in members], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if groups else np.zeros(0, int)
        self._sizes = np.array(sizes, dtype=np.int64)
        self._seconds = np.array([comm[shape].seconds for shape in shapes])
        self._spread = np.array([comm[shape].spread for shape in shapes])
        self.bytes_per_worker = sum(2 * (size - 1) for size in sizes) * model.sent_bytes / model.workers

    def run(self, started: np.ndarray, noise: np.ndarray, with_comm: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return when each worker has its group's mean, and how long its message is in flight."""
        arrives = np.full_like(started, -np.inf)
        in_flight_s = np.zeros_like(started)
        if len(self._members):
            last = np.maximum.reduceat(started[:, self._members], self._starts, axis=1)
            comm_s = self._seconds * comm_factor(self._spread, noise[:, None]) * with_comm
            arrives[:, self._members] = np.repeat(last + comm_s, self._sizes, axis=1)
            in_flight_s[:, self._members] = np.repeat(np.broadcast_to(comm_s, last.shape), self._sizes, axis=1)
        return arrives, in_flight_s


def divisible(model: ClusterModel, method: Divisible) -> Forecast:
    config, comm = method.config, model.comm
    message_bytes = method.compressor.size_bytes(model.parameters)
    background_bytes = 2 * model.model_bytes + ELEMENT_BYTES
    summed = config.compressor in SUMMED_COMPRESSORS
    kind = MEAN if summed else GATHER
    foreground = comm.time(kind, model.all_workers, message_bytes).after_pause(model.mean_compute_s)
    queued = None
    if not summed and any(table.kind == GATHER_DURING_MEAN for table in model.spec.tables):
        queued = comm.time(GATHER_DURING_MEAN, model.all_workers, message_bytes)
    background = comm.time(MEAN, model.all_workers, background_bytes)
    period, delay = config.period, method.delay
    update_s = model.update_s(8) + model.model_bytes / model.spec.costs.compressing_bytes_per_s
    slowest = model.compute_s.max(axis=-1) + update_s

    def mean_step_s(with_comm: bool) -> np.ndarray:
        factor = comm_factor(foreground.spread, model.comm_noise) * with_comm
        finished = np.zeros(model.num_runs)
        warm_up_s = np.zeros(model.num_runs)
        left_s = np.zeros(model.num_runs)
        """Transfer time that the background message still needs."""
        merge_at = -1
        num_warm_up = max(1, NUM_WARM_UP_STEPS // period) * period
        for k in range(NUM_STEPS):
            compute = np.where(left_s > 0, model.compute_during_comm(slowest[k], left_s), slowest[k])
            left_s = np.maximum(0.0, left_s - compute)
            if queued is None:
                # Both messages share the cards: the background takes half of the bandwidth until one of them is done.
                transfer = foreground.transfer_s * factor
                shared = np.minimum(left_s, transfer)
                foreground_s = transfer + shared + foreground.latency_s * factor
                left_s = np.maximum(0.0, left_s - shared - foreground.latency_s * factor)
            else:
                # The foreground queues behind the background as long as that is in flight.
                queueing = np.minimum(1.0, left_s / queued.seconds) * max(0.0, queued.seconds - foreground.seconds)
                foreground_s = (foreground.seconds + queueing) * factor
                left_s = np.maximum(0.0, left_s - foreground_s)
            finished = finished + compute + foreground_s
            if k == merge_at:
                wait_s = np.where(left_s > 0, left_s + background.latency_s * factor, 0.0)
                finished, left_s, merge_at = finished + wait_s, np.zeros_like(left_s), -1
            if k % period == 0 and merge_at < 0:
                left_s, merge_at = background.transfer_s * factor, k + delay
                if delay == 0:
                    finished, left_s, merge_at = finished + background.seconds * factor, np.zeros_like(left_s), -1
            if k + 1 == num_warm_up:
                warm_up_s = finished
        step_s: np.ndarray = (finished - warm_up_s) / (NUM_STEPS - num_warm_up)
        return step_s

    foreground_bytes = _allreduce_bytes(model.workers, message_bytes) if summed else (model.workers - 1) * message_bytes
    background_per_step = CommTime(background.latency_s / period, background.transfer_s / period)
    return Forecast(
        step_s=mean_step_s(with_comm=True),
        no_comm_step_s=mean_step_s(with_comm=False),
        dominant_comm=_longest([foreground, background_per_step]),
        bytes_per_step=foreground_bytes + _allreduce_bytes(model.workers, background_bytes) / period,
        contraction=0.0,
        memory_vectors=10,
        late_steps=(1 - 1 / config.ratio) * ((period + 1) / 2 + delay),
    )


def lasgd(model: ClusterModel, method: LASGD) -> Forecast:
    period = method.period
    comm = model.comm.time(MEAN, model.all_workers, model.sent_bytes).after_pause(period * model.mean_compute_s)
    local_s = model.compute_s.mean(axis=0) + model.update_s(2)
    # From one merge to the next: the steps of the slowest worker, then the average.
    cycle_s = period * local_s.max(axis=1) + comm.seconds
    in_flight_share = comm.seconds / np.maximum(cycle_s, 1e-12)
    step_s = _mean_step_s(_slowed(model, local_s, in_flight_share[:, None]))
    steps_per_cycle = float(np.mean(np.maximum(cycle_s, step_s) / step_s))
    delay_steps = float(np.mean(comm.seconds / step_s))
    return Forecast(
        step_s=step_s,
        no_comm_step_s=_mean_step_s(local_s),
        dominant_comm=comm,
        bytes_per_step=_allreduce_bytes(model.workers, model.sent_bytes) / steps_per_cycle,
        contraction=periodic_contraction(steps_per_cycle, delay_steps),
        memory_vectors=3,
    )


def gossip(model: ClusterModel, method: Gossip | A2CiD2) -> Forecast:
    local_s = model.compute_s.mean(axis=0) + model.update_s(2)
    no_comm_s = _mean_step_s(local_s)
    back_to_back = slowest_exchange(model, method.topology)
    possible = min(method.rate, model.max_rate)
    comm = back_to_back.after_pause(model.mean_compute_s / possible - back_to_back.seconds)
    rate = _achieved_rate(possible, float(no_comm_s.mean()), comm.seconds, method.topology)
    # A worker without a free peer keeps its link idle, but its neighbours' links are busy: as many messages are in
    # flight as if none waited for a peer.
    in_flight_share = min(1.0, possible * comm.seconds / float(no_comm_s.mean()))
    return Forecast(
        step_s=_mean_step_s(_slowed(model, local_s, in_flight_share)),
        no_comm_step_s=no_comm_s,
        dominant_comm=comm,
        bytes_per_step=rate * model.sent_bytes,
        contraction=method.disagreement().contraction(rate / method.rate),
        memory_vectors=4 if isinstance(method, A2CiD2) else 3,
    )


def _slowed(model: ClusterModel, local_s: np.ndarray, in_flight_share: np.ndarray | float) -> np.ndarray:
    """Return the step times of workers that do not wait, with messages in flight for a share of the time."""
    slowed: np.ndarray = local_s * (1 + in_flight_share * (model.spec.costs.slowdown - 1))
    return slowed


def slowest_exchange(model: ClusterModel, topology: Topology) -> CommTime:
    """Return the time of an exchange over the slowest kind of link in the graph, while all workers exchange."""
    if model.workers == 1:
        return CommTime()
    per_node = model.spec.per_node
    nodes = topology.edges // per_node
    rates = topology.rates()
    crossing = float(rates[nodes[:, 0] != nodes[:, 1]].sum() / rates.sum())
    if crossing:
        return model.comm.time(EXCHANGE, GroupShape(2, 2, max(1, round(crossing * per_node))), model.sent_bytes)
    return model.comm.time(EXCHANGE, GroupShape(2, 1, max(1, per_node // 2)), model.sent_bytes)


def _achieved_rate(rate: float, step_s: float, exchange_s: float, topology: Topology) -> float:
    """Return the exchanges per step that a worker achieves.

    It does one at a time, and its neighbours may all be busy with others. With d neighbours it can exchange for about
    d/(d + 2) of the time (fitted to the virtual cluster).
    """
    if topology.workers == 1:
        return 0.0
    if exchange_s == 0:
        return rate
    degree = float(topology.degrees.mean())
    max_rate = degree / (degree + 2) * step_s / exchange_s
    return float((rate**-4 + max_rate**-4) ** -0.25)


def _mean_step_s(local_s: np.ndarray) -> np.ndarray:
    """Return the time in which workers that do not wait do one step each on average."""
    step_s: np.ndarray = local_s.shape[1] / (1.0 / local_s).sum(axis=1)
    return step_s


def _longest(comm_times: list[CommTime]) -> CommTime:
    return max(comm_times, key=lambda comm: comm.seconds, default=CommTime())


def _allreduce_bytes(members: int, size_bytes: float) -> float:
    return 2 * (members - 1) / members * size_bytes


FORMS: dict[type[Method], Callable[..., Forecast]] = {
    AllReduce: allreduce,
    LocalSGD: localsgd,
    Overlap: overlap,
    Divisible: divisible,
    LASGD: lasgd,
    Gossip: gossip,
    A2CiD2: gossip,
}
