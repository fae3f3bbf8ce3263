"""How long the ranks of a replica wait for each other in a step: DDP's all-reduce, or FSDP2's gathers and reductions.

A step of a replica takes the compute of its slowest rank, and what it sends inside that does not hide behind compute.
The links inside carry one message after another; a ring of K ranks takes (K − 1)/K of the bytes and K − 1 latencies
for an all-gather or a reduce-scatter, twice that for an all-reduce.

DDP
    Gradients become ready evenly over the backward pass, and travel in buckets as torch makes them: the first of 1 MB,
    the others of 25 MB. The last bucket is only complete when the backward pass ends.
FSDP2
    The model consists of blocks of equal size. Before the forward pass of a block its parameters are gathered, and
    again before its backward pass; after that its gradients are reduced and scattered. The gather of the next block,
    and the reduction of the last one, go on while a block is computed. The first gather of each pass and the last
    reduction have nothing to hide behind. On CPUs (``overlaps`` is false) torch waits for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gossamer.hardware import Link

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Of torch's DistributedDataParallel."""


MAX_RATE = 0.5
"""Exchanges per step between replicas: each begins at the end of a step and is merged at the end of a later one."""

INSIDE = ("ddp", "fsdp")
BLOCKS = 12
"""Of a model of which nobody has said how many it has."""

BACKWARD_SHARE = 2 / 3
"""Of a gradient's time, where it was not measured: the backward pass costs about two forward passes."""


def split_gradient(seconds: float) -> tuple[float, float]:
    """Return the times of the forward and the backward pass of a gradient."""
    return (1 - BACKWARD_SHARE) * seconds, BACKWARD_SHARE * seconds


@dataclass(frozen=True)
class ReplicaShape:
    """The ranks of a replica, and what connects them."""

    ranks: int
    inside: str
    """``ddp`` or ``fsdp``."""
    link: Link
    blocks: int = BLOCKS
    """What FSDP2 gathers one after another."""
    overlaps: bool = True
    """Whether FSDP2's messages travel beside compute, as on accelerators."""
    measured_s: float | None = None
    """How long a step took beyond the compute of its slowest rank, as measured; None: it was not."""
    measured_bytes: float = 0.0
    """The size of the model with which that was measured."""

    @property
    def part(self) -> float:
        """The share of a vector that one rank sends to its counterpart in another replica."""
        return 1 / self.ranks if self.inside == "fsdp" else 1.0

    @property
    def copies(self) -> int:
        """How often all ranks together send a vector: with DDP each of them sends all of it."""
        return round(self.ranks * self.part)

    @property
    def agreement_s(self) -> float:
        """How long its ranks take to agree on a collective between replicas: a short gather before it, one after it."""
        return 2 * (self.ranks - 1) * self.link.latency_s

    def exposed_s(self, size_bytes: float, forward_s: float, backward_s: float) -> float:
        """Return how long a step waits for messages inside, for a model of this size."""
        if self.ranks == 1:
            return 0.0
        messages_s = self._messages_s(size_bytes, forward_s, backward_s)
        if self.measured_s is None:
            return messages_s
        # What the messages do not explain, such as hooks and copies, is taken to be the same for other models.
        return max(0.0, self.measured_s + messages_s - self._messages_s(self.measured_bytes, forward_s, backward_s))

    def with_ranks(self, ranks: int, inside: str) -> ReplicaShape:
        """Return a replica of other ranks over the same links; what was measured holds for this shape only."""
        if (ranks, inside) == (self.ranks, self.inside):
            return self
        return replace(self, ranks=ranks, inside=inside, measured_s=None, measured_bytes=0.0)

    def _messages_s(self, size_bytes: float, forward_s: float, backward_s: float) -> float:
        if self.inside == "ddp":
            return self._ddp_s(size_bytes, backward_s)
        return self._fsdp_s(size_bytes, forward_s, backward_s)

    def _half_ring_s(self, size_bytes: float) -> float:
        """Return the time of an all-gather or a reduce-scatter of a vector of this size in all."""
        rounds = self.ranks - 1
        return rounds * self.link.latency_s + rounds / self.ranks * size_bytes / self.link.bytes_per_s

    def _ddp_s(self, size_bytes: float, backward_s: float) -> float:
        left, ready, ended_s = size_bytes, 0.0, 0.0
        bucket = float(FIRST_BUCKET_BYTES)
        while left > 0:
            bucket = min(bucket, left)
            ready, left = ready + bucket, left - bucket
            ended_s = max(ended_s, backward_s * ready / size_bytes) + 2 * self._half_ring_s(bucket)
            bucket = float(BUCKET_BYTES)
        return max(0.0, ended_s - backward_s)

    def _fsdp_s(self, size_bytes: float, forward_s: float, backward_s: float) -> float:
        message_s, later = self._half_ring_s(size_bytes / self.blocks), self.blocks - 1
        if not self.overlaps:
            return 3 * self.blocks * message_s
        forward_wait_s = message_s + later * max(0.0, message_s - forward_s / self.blocks)
        backward_wait_s = message_s + later * max(0.0, 2 * message_s - backward_s / self.blocks) + message_s
        return forward_wait_s + backward_wait_s
