"""The mean of a vector over all members, bucket by bucket: each bucket is sent as soon as its content is known.

Buckets travel in a fixed order, from the end of the vector to its beginning, so it does not matter when a member sends
one. With the last one each member says whether what it has sent before still holds. If that is not so on all of them,
the mean is void on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.process.collectives.call import Call
from gossamer.process.collectives.groups import ROUND_RESIDUE, TAIL, Groups, differing_rounds
from gossamer.process.collectives.membership import Communication, Membership

NUM_WORDS = 3
"""What travels with the last bucket: the residue of the round and its square, whether what was sent holds."""


class Bucket(NamedTuple):
    """A part of the vector, and the parameters that it consists of."""

    start: int
    end: int
    first: int
    """The first of its parameters; the last is the one before the first of the previous bucket."""


def divide(ends: Sequence[int], max_elements: int) -> list[Bucket]:
    """Return the buckets in the order in which they are sent; ``ends``: of the parameters in the vector.

    The last parameter is in the first bucket, as backward computes its gradient first. A bucket has more than
    ``max_elements`` only if a parameter has.
    """
    starts = [0, *ends[:-1]]
    buckets: list[Bucket] = []
    end = ends[-1]
    for first in reversed(range(len(ends))):
        before = starts[first - 1] if first else None
        if before is None or end - before > max_elements:
            buckets.append(Bucket(starts[first], end, first))
            end = starts[first]
    return buckets


class BucketMean:
    """The mean of one vector per round. All calls come from one thread."""

    def __init__(self, groups: Groups, channel: str, buffer: Tensor) -> None:
        """``buffer``: memory for the result, ``TAIL`` elements longer than it."""
        self._groups, self._channel, self._buffer = groups, channel, buffer
        self.mean = buffer[TAIL:]
        """The result. What precedes it in memory travels along with the last bucket, which is at its beginning."""
        self.num_members = 0
        """How many took part in the newest bucket."""

    def send(self, of: Membership, call: Call, sent: Tensor, bucket: Bucket, holds: bool, generation: int) -> bool:
        """Average one bucket, whose content is ``sent``; return whether everything that was sent holds everywhere.

        ``holds``: whether everything that this member has sent in this round does.
        """
        is_last = bucket.start == 0
        mean = self.mean[bucket.start : bucket.end]
        words: list[float] = []

        def communicate(group: Any, call: Call) -> Communication:
            if group.size() == 2:
                return [group.exchange(sent, mean, words=(float(call.round), float(holds)), received_words=words)]
            if not is_last:
                return [group.mean(sent, mean)]
            residue = float(call.round % ROUND_RESIDUE)
            mean.copy_(sent)
            self._buffer[:TAIL].zero_()[:NUM_WORDS] = torch.tensor([residue, residue**2, float(holds)])
            buffer = self._buffer[: TAIL + bucket.end]
            return [group.mean(buffer, buffer)]

        members, call = of.run(self._channel, communicate, call, generation)
        num_members = self.num_members = len(members)
        if num_members == 1:
            mean.copy_(sent)
        elif num_members == 2:
            mean.add_(sent).div_(2)
            if int(words[0]) != call.round:
                (peer,) = (rank for rank in members if rank != self._groups.rank)
                raise differing_rounds(call, self._groups.rank, 0, peer, int(words[0]), 0)
            return holds and bool(words[1])
        elif is_last:
            residue, square, holding = (num_members * word for word in self._buffer[:NUM_WORDS].tolist())
            numbers = [num_members, residue, square, 0.0]
            self._groups.check_rounds(of, self._channel, call, numbers, num_members, 0, sent)
            return round(holding) == num_members
        return holds
