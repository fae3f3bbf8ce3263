"""The collectives of one worker: means and gathers among the members of a membership."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.process.collectives import gloo
from gossamer.process.collectives.group_builder import GroupBuilder
from gossamer.process.collectives.membership import AVERAGED, FINISH, FOREGROUND, TRAIN, Communication, Membership
from gossamer.process.collectives.state_transfer import TransferableState
from gossamer.process.lifecycle import Lifecycle
from gossamer.process.store.heartbeats import Heartbeats


class Groups:
    """The three memberships of a worker and the collectives in them."""

    def __init__(
        self,
        num_workers: int,
        builder: GroupBuilder,
        heartbeats: Heartbeats,
        state: TransferableState,
        lifecycle: Lifecycle,
        owner: str,
    ) -> None:
        """``owner``: the channel that rebuilds the membership for training."""
        self.rank, self.everybody, self.lifecycle = builder.rank, range(num_workers), lifecycle
        make = partial(Membership, everybody=self.everybody, builder=builder, heartbeats=heartbeats, state=state)
        self.train = make(TRAIN, owner, over=lambda: lifecycle.stopped)
        self.averaged = make(AVERAGED, FOREGROUND, over=lambda: lifecycle.stopped)
        self.finish = make(FINISH, FOREGROUND, over=lambda: lifecycle.closed)
        self._all = (self.train, self.averaged, self.finish)

    def poll(self) -> None:
        """Read which generations are requested. Runs in the heartbeat thread."""
        self.finish.poll()
        if not self.lifecycle.done:
            self.train.poll()
            self.averaged.poll()

    def republish(self) -> None:
        for membership in self._all:
            membership.republish()

    def mean(
        self,
        of: Membership,
        channel: str,
        vector: Tensor,
        among: tuple[int, ...] | None = None,
        out: Tensor | None = None,
        started_in: int | None = None,
    ) -> tuple[Tensor, int]:
        """Return the mean of ``vector`` over the members of ``among`` (in ``out`` if given), and their number."""
        mean = torch.empty_like(vector) if out is None else out
        in_pairs = False

        def communicate(group: Any) -> Communication:
            nonlocal in_pairs
            in_pairs = group.size() == 2 and not vector.is_cuda
            if in_pairs:
                # Two workers swap their vectors: a third less time than an all-reduce of two.
                return [gloo.PairExchange(group, vector, mean)]
            mean.copy_(vector)
            return [group.allreduce([mean], dist.AllreduceOptions())]

        members = of.run(channel, communicate, among, started_in, on_gpu=vector.is_cuda)
        if len(members) == 1:
            mean.copy_(vector)
        elif in_pairs:
            mean.add_(vector).div_(2)
        else:
            mean.div_(len(members))
        return mean, len(members)

    def gather(self, of: Membership, channel: str, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Return the tensors of every member, in rank order."""
        gathered: list[list[Tensor]] = []

        def communicate(group: Any) -> Communication:
            gathered[:] = [[torch.empty_like(tensor) for _ in range(group.size())] for tensor in tensors]
            return [group.allgather([out], [tensor]) for out, tensor in zip(gathered, tensors, strict=True)]

        members = of.run(channel, communicate, on_gpu=tensors[0].is_cuda)
        return [tensors] if len(members) == 1 else list(zip(*gathered, strict=True))

    def release(self) -> None:
        """Drop all process groups once their collectives have ended; the other members notice and go on."""
        for membership in self._all:
            membership.release()

    def disconnect(self) -> None:
        for membership in self._all:
            membership.disconnect()
