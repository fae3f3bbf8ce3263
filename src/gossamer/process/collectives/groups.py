"""Averages over groups of workers, among those of them that are there (``membership``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.process.collectives import gloo
from gossamer.process.collectives.membership import AVERAGED, FINISH, FOREGROUND, TRAIN, Communications, Membership
from gossamer.process.collectives.state_transfer import State
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.heartbeats import Heartbeats


class Groups:
    """All averages this worker takes part in."""

    def __init__(
        self,
        rank: int,
        workers: int,
        store: FailoverStore,
        heartbeats: Heartbeats,
        state: State,
        owner: str,
        stopped: Callable[[], bool],
        ended: Callable[[], bool],
    ) -> None:
        self.rank, self.everybody = rank, range(workers)
        self.store, self.heartbeats, self.state = store, heartbeats, state
        self.train = Membership(self, TRAIN, owner, stopped)
        self.averaged = Membership(self, AVERAGED, FOREGROUND, stopped)
        self.finish = Membership(self, FINISH, FOREGROUND, ended)

    def poll(self, training: bool) -> None:
        """Hear what the others want; beside the training, or what comes after it."""
        self.finish.poll()
        if training:
            self.train.poll()
            self.averaged.poll()

    def republish(self) -> None:
        """Leave all our entries at the meeting point anew."""
        for membership in (self.train, self.averaged, self.finish):
            membership.republish()

    def done(self, rank: int) -> bool:
        """Whether ``rank`` says that it is done with its training."""
        return self.store.get(f"done/{rank}") == b"1"

    def mean(
        self,
        of: Membership,
        channel: str,
        vector: Tensor,
        among: tuple[int, ...] | None = None,
        out: Tensor | None = None,
        begun: int | None = None,
    ) -> tuple[Tensor, int]:
        """The mean of ``vector`` over those of ``among`` that are there, where it lies (in ``out``, if given), and how
        many they are."""
        mean = torch.empty_like(vector) if out is None else out

        traded = False

        def communicate(group: Any) -> Communications:
            nonlocal traded
            traded = group.size() == 2 and not vector.is_cuda
            if traded:
                # Two need no algorithm: they trade their vectors, which takes a third less time.
                return [gloo.PairExchange(group, vector, mean)]
            mean.copy_(vector)
            return [group.allreduce([mean], dist.AllreduceOptions())]

        present = of.run(channel, communicate, among, begun, on_gpu=vector.is_cuda)
        if len(present) == 1:
            mean.copy_(vector)
        elif traded:
            mean.add_(vector).div_(2)
        else:
            mean.div_(len(present))
        return mean, len(present)

    def gather(self, of: Membership, channel: str, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Everybody's tensors, in rank order."""
        collected: list[list[Tensor]] = []

        def communicate(group: Any) -> Communications:
            collected[:] = [[torch.empty_like(tensor) for _ in range(group.size())] for tensor in tensors]
            return [group.allgather([out], [tensor]) for out, tensor in zip(collected, tensors, strict=True)]

        present = of.run(channel, communicate, on_gpu=tensors[0].is_cuda)
        return [tensors] if len(present) == 1 else list(zip(*collected, strict=True))

    def leave(self) -> None:
        """Let go of all groups, once what is under way in them is over; the others notice and go on."""
        for membership in (self.train, self.averaged, self.finish):
            membership.leave()

    def close(self) -> None:
        """Let go of all groups at once; whoever of us waits in one is let go too."""
        for membership in (self.train, self.averaged, self.finish):
            membership.let_go()
