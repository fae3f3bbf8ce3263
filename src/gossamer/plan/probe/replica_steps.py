"""A rank of a replica in a probe: its steps with DDP or FSDP2, and torch's own messages inside the replica."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import InputError
from gossamer.hardware import Link
from gossamer.plan.probe.message_timer import MIN_BYTES
from gossamer.plan.probe.session import ProbeSession
from gossamer.process.store.rank_info import RankInfo, free_port
from gossamer.replica_time import BUCKET_BYTES, ReplicaShape
from gossamer.train.job_spec import JobSpec
from gossamer.train.replica.parallel import blocks
from gossamer.train.replica.place import ReplicaPlace
from gossamer.train.replica.rank import ReplicaRank
from gossamer.train.worker_task import WorkerTask, own_device

LARGER = 64
"""The longer message is at least this many times longer: two sizes say latency and bandwidth."""
NUM_WARM_UP, NUM_REPEATS = 2, 9

# Their names since torch 2.13, and before.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def check_replicas(session: ProbeSession, size: int) -> None:
    """InputError, the same on all ranks, if a replica of ``size`` ranks would not lie within one node."""
    per_node = session.workers // len(set(session.node_of))
    if per_node % size:
        raise InputError(
            f"--replica-size is {size}: expected a divisor of the {per_node} ranks of a node, so that each replica "
            "lies within one"
        )


class ReplicaSteps:
    """What one rank of a replica measures together with the others of it."""

    def __init__(self, session: ProbeSession, job_spec: JobSpec, rank_info: RankInfo) -> None:
        """``rank_info``: that of this process among all ranks of all replicas. Starts the replica's process group."""
        run = job_spec.run()
        size, worker = run.config.replica_size, session.rank // run.config.replica_size
        device = own_device(run.config.device)
        first, shard = worker * size, session.rank % size
        # The first rank of a replica says where its ranks meet.
        ports = session.share("rendezvous", free_port() if shard == 0 else 0)
        host = session.addresses[first]
        meet = f"{host}:{ports[first]}"
        of_worker = dataclasses.replace(rank_info, rank=worker, workers=session.workers // size)
        self.rank = session.guarded(lambda: ReplicaRank(ReplicaPlace(shard, size, meet), of_worker, device))
        self.task = WorkerTask(run, worker, self.rank)
        self.pace = job_spec.pace(run, worker, threading.Event(), shard)
        self._spread = self.rank.spread_pace(self.task.plain_model, self.pace)
        num_blocks = max(1, len(blocks(self.task.plain_model)))
        # On CPUs torch waits for each message of FSDP2.
        self.shape = ReplicaShape(size, run.config.inside, Link(0.0, 0.0), num_blocks, overlaps=device.type != "cpu")

    def timed_step(self, number: int) -> float:
        """Make a step as training does, and return its seconds."""
        began = time.monotonic()
        if self._spread is not None:
            self._spread.gradient_s = self.pace.draw()
        self.task.gradient(number)
        if self._spread is None:
            self.task.synchronize()
            self.pace.delay(began)
        self.task.update(number)
        self.task.synchronize()
        return time.monotonic() - began

    def measured_link(self, session: ProbeSession, model_bytes: int) -> Link:
        """Return latency and bandwidth of the links inside, from messages of the kind and the size that a step sends.

        The same on all ranks: the median of the replicas, which measure at once.
        """
        ranks, typical = self.shape.ranks, model_bytes
        if self.shape.inside == "fsdp":
            typical = model_bytes // self.shape.blocks
        sizes = (MIN_BYTES, max(LARGER * MIN_BYTES, min(typical, BUCKET_BYTES)))
        session.barrier()
        own = [session.guarded(partial(self._half_ring_s, size)) for size in sizes]
        small_s, large_s = (statistics.median(times) for times in zip(*session.share("inside", own), strict=True))
        return ring_link(ranks, sizes, (small_s, large_s))

    def _half_ring_s(self, size_bytes: int) -> float:
        """Return the time of an all-gather or a reduce-scatter: FSDP2's mean, or half of DDP's all-reduce."""
        ranks, group = self.shape.ranks, self.rank.mesh.get_group()
        part = torch.ones(max(1, size_bytes // 4 // ranks), device=self.task.device)
        whole = torch.ones(ranks * len(part), device=self.task.device)
        if self.shape.inside == "ddp":
            return self._median_s(lambda: dist.all_reduce(whole, group=group)) / 2
        gather_s = self._median_s(lambda: ALL_GATHER(whole, part, group=group))
        scatter_s = self._median_s(lambda: REDUCE_SCATTER(part, whole, group=group))
        # A block is gathered before each of its two passes.
        return (2 * gather_s + scatter_s) / 3

    def _median_s(self, collective: Callable[[], Tensor | dist.Work | None]) -> float:
        times = []
        for _ in range(NUM_WARM_UP + NUM_REPEATS):
            began = time.monotonic()
            collective()
            self.task.synchronize()
            times.append(time.monotonic() - began)
        return statistics.median(times[NUM_WARM_UP:])

    def close(self) -> None:
        self.rank.close()


def ring_link(ranks: int, sizes_bytes: tuple[int, int], times_s: tuple[float, float]) -> Link:
    """Return the link over which half a ring all-reduce of a short and of a long message takes these times."""
    (small, large), (small_s, large_s) = sizes_bytes, times_s
    # On a busy machine the shorter message may take longer.
    per_byte_s = (large_s - small_s) / (large - small) if large_s > small_s else large_s / large
    per_byte_s *= ranks / (ranks - 1)
    return Link(1 / per_byte_s, max(0.0, small_s / (ranks - 1) - per_byte_s * small / ranks))
