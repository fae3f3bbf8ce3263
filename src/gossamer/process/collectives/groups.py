"""The collectives of one worker: means, gathers and shifts among the members of a membership."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.effects import MAX_SCALARS
from gossamer.errors import MethodError
from gossamer.process.collectives.call import Call, mismatch
from gossamer.process.collectives.group_builder import GroupBuilder
from gossamer.process.collectives.member_entries import MemberEntries
from gossamer.process.collectives.membership import FOREGROUND, Communication, Membership
from gossamer.process.collectives.peer_group import Pending
from gossamer.process.lifecycle import Lifecycle
from gossamer.process.liveness.heartbeats import Heartbeats
from gossamer.process.roster.roster import KnownRoster
from gossamer.process.state.state_transfer import TransferableState
from gossamer.process.views.agreement import Agreement
from gossamer.process.views.messages import AVERAGED, FINISH, TRAIN

TAIL = 4 + MAX_SCALARS
"""What follows a vector in an all-reduce: its weight, the residue of the round and its square, the number of scalars,
the scalars."""

ROUND_RESIDUE = 61
"""Small enough for the sum of its squares over thousands of workers to be exact in float32."""

ALIGNMENT = 16
"""In bytes: of each tensor in a gathered message."""


class MeanResult(NamedTuple):
    mean: Tensor
    scalars: tuple[float, ...]
    members: int
    weight: float
    """Sum of all members' weights."""


class Groups:
    """The three memberships of a worker and the collectives in them."""

    def __init__(
        self,
        everybody: KnownRoster,
        builder: GroupBuilder,
        heartbeats: Heartbeats,
        agreement: Agreement,
        state: TransferableState,
        lifecycle: Lifecycle,
        owner: str,
    ) -> None:
        """``owner``: the channel that rebuilds the membership for training."""
        self.rank, self.everybody, self.lifecycle = builder.rank, everybody, lifecycle
        make = partial(
            Membership,
            everybody=self.everybody,
            builder=builder,
            entries=MemberEntries(heartbeats, agreement.refusals),
            heartbeats=heartbeats,
            agreement=agreement,
            state=state,
        )
        self.train = make(TRAIN, owner, over=lambda: lifecycle.stopped)
        self.averaged = make(AVERAGED, FOREGROUND, over=lambda: lifecycle.stopped)
        # In lockstep a worker that came back may be in an average that the others have left, or the other way round.
        self.averaged.needed_elsewhere = self.train.waited_for_by
        self.finish = make(FINISH, FOREGROUND, over=lambda: lifecycle.closed)
        self._all = (self.train, self.averaged, self.finish)

    def poll(self) -> None:
        """Look after collectives that last. Runs in the heartbeat thread."""
        self.finish.poll()
        if not self.lifecycle.done:
            self.train.poll()
            self.averaged.poll()

    def mean(
        self,
        of: Membership,
        channel: str,
        vector: Tensor,
        call: Call,
        *,
        weight: float = 1.0,
        scalars: Sequence[float] = (),
        out: Tensor | None = None,
        started_in: int | None = None,
    ) -> MeanResult:
        """Return the weighted mean of ``vector`` over the members of the call.

        ``out``: memory for the result, ``TAIL`` elements longer than ``vector``.
        """
        size = len(vector)
        buffer = vector.new_empty(size + TAIL) if out is None else out
        mean, tail = buffer[:size], buffer[size:]
        pair: Pending | None = None
        words: list[float] = []

        def communicate(group: Any, call: Call) -> Communication:
            nonlocal pair
            if group.size() == 2 and not vector.is_cuda:
                # Two workers exchange their vectors: a third less time than an all-reduce of two.
                own = (weight, float(call.round), float(len(scalars)), *scalars)
                pair = group.exchange(vector, mean, words=own, received_words=words)
                return [pair]
            pair = None
            residue = float(call.round % ROUND_RESIDUE)
            torch.mul(vector, weight, out=mean) if weight != 1.0 else mean.copy_(vector)
            numbers = [weight, residue, residue**2, float(len(scalars)), *(weight * scalar for scalar in scalars)]
            tail.zero_()
            tail[: len(numbers)] = torch.tensor(numbers, dtype=vector.dtype)
            return [group.allreduce([buffer], dist.AllreduceOptions())]

        members, call = of.run(channel, communicate, call, started_in, on_gpu=vector.is_cuda)
        if len(members) == 1:
            mean.copy_(vector)
            return MeanResult(mean, tuple(scalars), 1, weight)
        if pair is not None:
            (peer,) = (rank for rank in members if rank != self.rank)
            if int(words[1]) != call.round or int(words[2]) != len(scalars):
                raise differing_rounds(call, self.rank, len(scalars), peer, int(words[1]), int(words[2]))
            total = weight + words[0]
            theirs = words[3 : 3 + len(scalars)]
            if weight == words[0] == 1.0:
                mean.add_(vector).div_(2)
            elif total > 0:
                # Two rounded products and their sum: the same to the bit at both ends.
                mean.mul_(words[0] / total).add_(vector * (weight / total))
            else:
                mean.zero_()
            sums = [weight * own + words[0] * other for own, other in zip(scalars, theirs, strict=True)]
            averages = [each / total if total else 0.0 for each in sums]
            return MeanResult(mean, tuple(averages), 2, total)
        numbers = tail.tolist()
        self.check_rounds(of, channel, call, numbers, len(members), len(scalars), vector)
        total = numbers[0]
        if total > 0:
            mean.div_(total)
        else:
            mean.zero_()
        averages = [number / total if total else 0.0 for number in numbers[4 : 4 + len(scalars)]]
        return MeanResult(mean, tuple(averages), len(members), total)

    def check_rounds(
        self,
        of: Membership,
        channel: str,
        call: Call,
        numbers: list[float],
        members: int,
        num_scalars: int,
        vector: Tensor,
    ) -> None:
        """Raise ``MethodError`` on all members if their rounds, or their numbers of scalars, differ."""
        if torch.finfo(vector.dtype).eps > torch.finfo(torch.float32).eps:
            return  # too narrow for these sums
        mean, mean_square = numbers[1] / members, numbers[2] / members
        # The variance of n residues that are not all equal is at least (n − 1)/n².
        differ = mean_square - mean**2 > 0.25 / members or round(numbers[3]) != members * num_scalars
        if not differ:
            return
        own = torch.tensor([call.round, num_scalars])
        described = self.gather(of, channel, (own,), Call("Gather", f"rounds of {call.topic}", 0, call.group))
        for rank, (theirs,) in zip(of.members_of(call.group), described, strict=True):
            if not torch.equal(own, theirs):
                raise differing_rounds(call, self.rank, num_scalars, rank, int(theirs[0]), int(theirs[1]))
        raise MethodError(f"the members of {call} are in different rounds: expected the same round on all of them")

    def gather(
        self,
        of: Membership,
        channel: str,
        tensors: tuple[Tensor, ...],
        call: Call,
        started_in: int | None = None,
    ) -> list[tuple[Tensor, ...]]:
        """Return the tensors of every member of the call, in rank order."""
        gathered: list[Tensor] = []

        def communicate(group: Any, call: Call) -> Communication:
            message = _pack(call.round, tensors)
            gathered[:] = [torch.empty_like(message) for _ in range(group.size())]
            return [group.allgather([gathered], [message])]

        members, call = of.run(channel, communicate, call, started_in, on_gpu=tensors[0].is_cuda)
        if len(members) == 1:
            return [tensors]
        result = []
        for rank, packed in zip(members, gathered, strict=True):
            round, unpacked = _unpack(packed, tensors)
            if round != call.round:
                raise differing_rounds(call, self.rank, 0, rank, round, 0)
            result.append(unpacked)
        return result

    def shift(
        self,
        of: Membership,
        channel: str,
        vector: Tensor,
        to: int,
        source: int,
        call: Call,
        *,
        scalars: Sequence[float],
        out: Tensor,
        started_in: int | None = None,
    ) -> tuple[Tensor | None, tuple[float, ...], bool]:
        """Send ``vector`` to rank ``to``, receive that of rank ``source`` in ``out``.

        Returns what was received (None if ``source`` is gone), its scalars, and whether ``to`` was there to receive.
        """
        words: list[float] = []
        delivered = False
        received: Tensor | None = None

        def communicate(group: Any, call: Call) -> Communication:
            nonlocal delivered, received
            indices = {rank: index for index, rank in enumerate(of.members)}
            delivered, received = to in indices, out if source in indices else None
            own = (float(call.round), float(len(scalars)), float(len(vector)), *scalars)
            return [
                group.exchange(
                    vector if delivered else None,
                    received,
                    indices.get(to, 0),
                    indices.get(source, 0),
                    words=own,
                    received_words=words,
                )
            ]

        if to == self.rank:
            return out.copy_(vector), tuple(scalars), True
        members, call = of.run(channel, communicate, call, started_in)
        if len(members) == 1:
            return None, (), False
        if received is None:
            return None, (), delivered
        if int(words[0]) != call.round or int(words[1]) != len(scalars):
            raise differing_rounds(call, self.rank, len(scalars), source, int(words[0]), int(words[1]))
        return received, tuple(words[3 : 3 + len(scalars)]), delivered

    def release(self) -> None:
        """Close all groups once their collectives have ended; the other members notice and go on."""
        for membership in self._all:
            membership.release()

    def disconnect(self) -> None:
        for membership in self._all:
            membership.disconnect()


def differing_rounds(
    call: Call, rank: int, num_scalars: int, peer: int, peer_round: int, peer_num_scalars: int
) -> MethodError:
    """Return the error of two members of one topic that are in different rounds, or send other numbers of scalars."""

    def described(round: int, num_scalars: int) -> str:
        with_scalars = f" with {num_scalars} scalars" if num_scalars else ""
        return f"{call.kind} {call.topic!r} round {round}{with_scalars}"

    return mismatch(rank, described(call.round, num_scalars), peer, described(peer_round, peer_num_scalars))


def _pack(round: int, tensors: tuple[Tensor, ...]) -> Tensor:
    """Return the round and the tensors as one message of bytes."""
    parts = [torch.tensor([round, 0], device=tensors[0].device).view(torch.uint8)]
    for tensor in tensors:
        parts.append(tensor.contiguous().flatten().view(torch.uint8))
        parts.append(parts[-1].new_zeros(-parts[-1].numel() % ALIGNMENT))
    return torch.cat(parts)


def _unpack(message: Tensor, like: tuple[Tensor, ...]) -> tuple[int, tuple[Tensor, ...]]:
    """Return round and tensors of a message, in the shapes of ``like``."""
    round, start, tensors = int(message[:8].view(torch.int64)), ALIGNMENT, []
    for tensor in like:
        tensors.append(message[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return round, tuple(tensors)
