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
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from gossamer.errors import InputError
from gossamer.process.collectives.membership import FOREGROUND, Membership
from gossamer.process.lifecycle import StepRetry, TrainingEnded
from gossamer.process.replica.inner_group import InnerGroup
from gossamer.process.replica.watch import ReplicaWatch
from gossamer.vectors.copies import Copies
from gossamer.vectors.vector_math import ROUNDING

COMPLETED, RETRY, ENDED = 0, 1, 2
"""What came of a collective: it completed; the membership has changed, or has to; the training has ended."""

AGREE_S = 60.0
"""How long the ranks of a replica try to agree on the same members."""

MEMBERS_MODULUS = (1 << 61) - 1
"""A prime number, so that sets of more than 61 members are told apart by their remainder too."""

T = TypeVar("T")


class Ended(Exception):
    """Base of exceptions that end what the ranks of a replica do together, without a new attempt."""


class Parted(Protocol):
    """The part of a replica's state that this rank has."""

    needs_state: bool
    taken_from: int | None
    taken_at: int

    def position(self, channel: str) -> int:
        """Return the step that this part is at."""


class Agreement:
    """One rank's part in what its replica agrees on."""

    def __init__(self, inner: InnerGroup, background: InnerGroup, watch: ReplicaWatch) -> None:
        """``background``: the same ranks in a group of their own, for the background thread."""
        self.inner, self.background, self.watch = inner, background, watch
        self.copies: Copies
        """How many of the ranks hold each part of the weights. From when the driver is there."""

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

    def distance(self, one: Tensor, other: Tensor) -> float:
        """Return the distance of two vectors of the whole replica; 0 if they are equal up to the rounding of a mean."""
        squared, norm = self.copies.squared_distance(one, other), torch.linalg.vector_norm(other).double() ** 2
        distance = self.total(squared) ** 0.5
        return distance if distance > ROUNDING * self.total(float(norm)) ** 0.5 else 0.0

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
        result, code, ended = self._attempt(act)
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
        result, code, ended = self._attempt(act)
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
                _, code, ended = self._attempt(lambda: of.rebuild(FOREGROUND))
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

    def _exchange(self, code: int, of: Membership, state: Parted | None = None) -> list[tuple[int, ...]]:
        """Return what came of it on each rank: a code, the members, the step, whose state was taken over."""
        members = sum(1 << rank for rank in of.members) % MEMBERS_MODULUS
        position, taken = (-1, None) if state is None else (state.position(FOREGROUND), state.taken_from)
        taken_at = 0 if state is None or taken is None else state.taken_at
        own = torch.tensor([code, members, position, -1 if taken is None else taken, taken_at])
        return [tuple(row.tolist()) for row in self.inner.gather(own)]

    def _attempt(self, act: Callable[[], T]) -> tuple[list[T], int, Exception | None]:
        """Return what ``act`` returns, in a list; what came of it; and the exception if it has ended."""
        try:
            return [act()], COMPLETED, None
        except StepRetry:
            return [], RETRY, None
        except (TrainingEnded, Ended) as ended:
            return [], ENDED, ended
        except RuntimeError:
            if self.watch.lost:
                # This rank has left the other replicas in the middle of it.
                raise InputError(self.watch.lost) from None
            raise
