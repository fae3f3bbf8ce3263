"""How the ranks of a replica agree: what happens to one part of the weights happens to all parts, or to none.

Rank k of each replica is in a run of its own, shard k, with rank k of the other replicas. Runs of different shards
notice the death of a replica at different moments: one may complete a collective that fails in another. So after each
collective the ranks of a replica compare what came of it. It counts if all of them completed it, among the same
replicas. Otherwise it is void for all of them: each rebuilds its membership, and the step is repeated. A replica whose
parts were taken over from different replicas would be torn: it ends.

The ranks of a replica call these functions in the same order, from the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import InputError
from gossamer.process.collectives.membership import FOREGROUND, Membership, StepRetry
from gossamer.process.lifecycle import TrainingEnded

COMPLETED, RETRY, ENDED = 0, 1, 2
"""What came of a collective: it completed; the membership has changed, or has to; the training has ended."""

AGREE_S = 60.0
"""How long the ranks of a replica try to agree on the same members."""

MEMBERS_MODULUS = (1 << 61) - 1
"""A prime number, so that sets of more than 61 members are told apart by their remainder too."""

T = TypeVar("T")


class Ended(Exception):
    """Base of exceptions that end what the ranks of a replica do together, without a new attempt."""


class InnerGroup:
    """The ranks of one replica, connected by a gloo group of their own: the user's groups are left alone."""

    def __init__(self, ranks: Sequence[int], shard: int, timeout_s: float) -> None:
        """``ranks``: those of the replica in the user's process group. ``shard``: the number of this one among them."""
        self.ranks, self.shard = list(ranks), shard
        self._group = None
        if len(self.ranks) > 1:
            timeout = timedelta(seconds=timeout_s)
            self._group = dist.new_group(self.ranks, timeout, "gloo", use_local_synchronization=True)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks of the replica, in order. All must have the same shape and dtype."""
        if self._group is None:
            return [own]
        parts = [torch.empty_like(own) for _ in self.ranks]
        try:
            dist.all_gather(parts, own, group=self._group)
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[0]
            raise InputError(
                f"a rank of this replica (ranks {self.ranks}) died or left, so the replica is gone and the other "
                f"replicas go on without it: restart the whole replica ({cause[:100]})"
            ) from None
        return parts

    def gather_bytes(self, message: bytes) -> list[bytes]:
        sizes = [int(size) for size in self.gather(torch.tensor([len(message)]))]
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        return [part[:size].numpy().tobytes() for part, size in zip(self.gather(padded), sizes, strict=True)]


class Parted(Protocol):
    """The part of a replica's state that this rank has."""

    needs_state: bool
    taken_from: int | None

    def position(self, channel: str) -> int:
        """Return the step that this part is at."""


class Agreement:
    """One rank's part in what its replica agrees on."""

    def __init__(self, inner: InnerGroup) -> None:
        self.inner = inner

    @property
    def shard(self) -> int:
        return self.inner.shard

    @property
    def size(self) -> int:
        return self.inner.size

    # Numbers of the whole replica

    def all_true(self, own: bool) -> bool:
        return all(int(flag) for flag in self.inner.gather(torch.tensor([int(own)])))

    def lowest(self, own: int) -> int:
        return min(int(number) for number in self.inner.gather(torch.tensor([own])))

    def total(self, own: float) -> float:
        return float(sum(self.inner.gather(torch.tensor([own], dtype=torch.float64))))

    def leaders(self, own: Tensor) -> Tensor:
        """Return the tensor of the replica's first rank."""
        return self.inner.gather(own)[0]

    def mean(self, own: Tensor) -> Tensor:
        return torch.stack(self.inner.gather(own)).mean(0)

    # Outcomes

    def whole(self, of: Membership, act: Callable[[], T]) -> T:
        """Return what ``act()`` returns, if it completes on all ranks of the replica among the same members.

        Otherwise StepRetry on all of them, and a new generation is requested; TrainingEnded if it has ended for one.
        """
        result, code, ended = _attempt(act)
        records = set(self._exchange(code, of))
        if any(record[0] == ENDED for record in records):
            raise ended or TrainingEnded
        if code != COMPLETED or len(records) > 1:
            of.request(of.generation + 1)
            raise StepRetry
        return result[0]

    def step(self, of: Membership, state: Parted, act: Callable[[], T]) -> T:
        """As ``whole``, for a collective of the training: memberships are rebuilt here, until they are the same."""
        state.taken_from = None
        result, code, ended = _attempt(act)
        until, pause_s = time.monotonic() + AGREE_S, 0.0
        while time.monotonic() < until:
            records = self._exchange(code, of, state)
            codes = [record[0] for record in records]
            if ENDED in codes:
                raise ended or TrainingEnded
            if len(set(records)) == 1:
                if code == COMPLETED:
                    return result[0]
                if state.needs_state:
                    break
                raise StepRetry
            if COMPLETED not in codes and len({record[:3] for record in records}) == 1:
                # The parts are of one step, but from different replicas: all take over anew, from the same one.
                state.needs_state = True
            if code == COMPLETED or COMPLETED not in codes:
                time.sleep(pause_s)
                pause_s = min(1.0, 2 * pause_s + 0.02)
                of.request(of.generation + 1)
                _, code, ended = _attempt(lambda: of.rebuild(FOREGROUND))
                code = max(code, RETRY)
        raise InputError(
            f"the ranks of this replica ({self.inner.ranks}) have parts of different states, so its weights would be "
            "torn: it ends, and the other replicas go on; restart the whole replica"
        )

    def joined(self, of: Membership, state: Parted) -> None:
        """Check that all ranks of the replica have joined the run at the same step, from the same replica."""
        records = self._exchange(RETRY, of, state)
        if len({record[2:] for record in records}) > 1:
            raise InputError(
                f"the ranks of this replica ({self.inner.ranks}) have joined at different steps or from different "
                "replicas, so its weights would be torn: start the replica again"
            )

    def _exchange(self, code: int, of: Membership, state: Parted | None = None) -> list[tuple[int, int, int, int]]:
        """Return what came of it on each rank: a code, the members, the step, whose state was taken over."""
        members = sum(1 << rank for rank in of.members) % MEMBERS_MODULUS
        position, taken = (-1, None) if state is None else (state.position(FOREGROUND), state.taken_from)
        own = torch.tensor([code, members, position, -1 if taken is None else taken])
        return [(int(row[0]), int(row[1]), int(row[2]), int(row[3])) for row in self.inner.gather(own)]


def _attempt(act: Callable[[], T]) -> tuple[list[T], int, Exception | None]:
    """Return what ``act`` returns, in a list; what came of it; and the exception if it has ended."""
    try:
        return [act()], COMPLETED, None
    except StepRetry:
        return [], RETRY, None
    except (TrainingEnded, Ended) as ended:
        return [], ENDED, ended
