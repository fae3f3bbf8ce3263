"""An encoded mean is two collectives: what happens to it if the members change between them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gossamer.process.collectives.call import Call
from gossamer.process.collectives.encoded_mean import EncodedMeans
from gossamer.process.lifecycle import CommAborted
from gossamer.process.runtime.staging import Staging
from gossamer.wire import MeanLink, find

OWNER, OTHER = "background", "training"
CALL = Call("Mean", "x", 3)


class Members:
    """Membership and groups of worker 0, whose peers have the same vector: they do what it does."""

    owner, rank = OWNER, 0

    def __init__(self, sizes: list[int]) -> None:
        """``sizes``: how many members each generation has. The next one begins before the answer of this one."""
        self.sizes, self.generation = sizes, 0
        self.gathered_in: list[int] = []

    def run(self, channel, communicate, call, started_in=None):
        size = self.sizes[self.generation]
        if size > 1:
            communicate(SimpleNamespace(size=lambda: size, rank=lambda: 0, alltoall_base=_alltoall), call)
        return list(range(size)), call

    def gather(self, of, channel, tensors, call, started_in):
        if self.generation + 1 < len(self.sizes):
            self.generation += 1
            if started_in != self.generation:
                raise CommAborted
        self.gathered_in.append(started_in)
        return [tensors] * self.sizes[self.generation]


def _alltoall(received, sent, *_):
    received[:] = sent[1]


def mean_of(members: Members, channel: str):
    means = EncodedMeans(members, Staging(torch.device("cpu")), lambda: MeanLink(find("bfloat16"), 0))
    vector = torch.full((8,), 2.0)
    return means.mean(members, channel, vector, CALL, weight=1.0, scalars=(), same=False, started_in=None)


def test_both_parts_of_a_mean_are_of_the_same_members():
    members = Members([3, 2])
    result, sent_bytes = mean_of(members, OWNER)
    assert result.members == 2
    assert members.gathered_in == [1]
    assert sent_bytes > 0


def test_who_is_left_alone_between_the_parts_keeps_its_vector():
    result, _ = mean_of(Members([2, 1]), OWNER)
    assert result.members == 1
    assert torch.equal(result.mean, torch.full((8,), 2.0))


def test_a_channel_that_does_not_rebuild_the_membership_loses_the_mean():
    with pytest.raises(CommAborted):
        mean_of(Members([3, 2]), OTHER)
