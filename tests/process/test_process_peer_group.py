"""Collectives of our own: their results, the same to the bit on all members, and how they end if a member does."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.process.collectives.group_connections import GroupConnections
from gossamer.process.collectives.peer_group import SHORT_BYTES, GroupFailed, PeerGroup
from gossamer.process.net.connection import Connection
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener

TIMEOUT_S = 30.0
LONG = SHORT_BYTES // 2 + 77
"""Elements of a vector that goes around the ring, in several pieces of several lengths."""


class Members:
    """The members of a group, each in a thread of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pairs: dict[tuple[int, int], Connection] = {}
        for one in range(size):
            for other in range(one):
                first, second = socket.socketpair()
                self.pairs[one, other], self.pairs[other, one] = Connection(first), Connection(second)
        self.groups = [PeerGroup(rank, size, lambda to, _, rank=rank: self.pairs[rank, to]) for rank in range(size)]

    def run(self, call: Callable[[PeerGroup], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(call, self.groups))

    def close(self) -> None:
        for connection in self.pairs.values():
            connection.close()


@contextlib.contextmanager
def members(size: int) -> Iterator[Members]:
    made = Members(size)
    try:
        yield made
    finally:
        made.close()


def drawn(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 100
    return values.to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 5, 1000, LONG, 500_000])
def test_a_sum_is_the_same_to_the_bit_everywhere(size: int, length: int) -> None:
    def reduce(group: PeerGroup) -> Tensor:
        for _ in range(2):
            tensor = drawn(group.rank(), length)
            group.allreduce([tensor]).wait(TIMEOUT_S)
        return tensor

    with members(size) as made:
        sums = made.run(reduce)
    exact = torch.stack([drawn(rank, length).double() for rank in range(size)]).sum(0)
    assert all(torch.equal(each, sums[0]) for each in sums)
    torch.testing.assert_close(sums[0].double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("length", [3, LONG])
def test_a_mean_is_the_sum_divided_and_leaves_what_was_sent(size: int, length: int) -> None:
    def average(group: PeerGroup) -> tuple[Tensor, Tensor, Tensor]:
        sent, out, in_place = drawn(group.rank(), length), torch.empty(length), drawn(group.rank(), length)
        group.mean(sent, out).wait(TIMEOUT_S)
        group.mean(in_place, in_place).wait(TIMEOUT_S)
        assert torch.equal(sent, drawn(group.rank(), length))
        group.allreduce([sent]).wait(TIMEOUT_S)
        return out, in_place, sent

    with members(size) as made:
        for out, in_place, total in made.run(average):
            assert torch.equal(out, total / size)
            assert torch.equal(in_place, out)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32])
@pytest.mark.parametrize("length", [3, LONG])
def test_sums_of_all_dtypes(dtype: torch.dtype, length: int) -> None:
    def reduce(group: PeerGroup) -> Tensor:
        tensor = torch.full((length,), group.rank() + 1, dtype=dtype)
        group.allreduce([tensor]).wait(TIMEOUT_S)
        return tensor

    with members(3) as made:
        for found in made.run(reduce):
            assert torch.equal(found, torch.full((length,), 6, dtype=dtype))


@pytest.mark.parametrize("size", [2, 3, 5, 6, 8])
@pytest.mark.parametrize("length", [0, 1, 100, 300_000])
def test_gathers_broadcasts_and_all_to_alls(size: int, length: int) -> None:
    def run(group: PeerGroup) -> tuple[list[Tensor], list[Tensor], Tensor]:
        outputs = [torch.empty(length) for _ in range(size)]
        group.allgather([outputs], [drawn(group.rank(), length)]).wait(TIMEOUT_S)
        spread = []
        for root in range(size):
            tensor = drawn(group.rank(), length)
            group.broadcast([tensor], root).wait(TIMEOUT_S)
            spread.append(tensor)
        rows = torch.arange(size).unsqueeze(1).repeat(1, length + 1) + 100 * group.rank()
        received = torch.empty_like(rows)
        group.alltoall_base(received, rows).wait(TIMEOUT_S)
        return outputs, spread, received

    with members(size) as made:
        found = made.run(run)
    expected = [drawn(rank, length) for rank in range(size)]
    for rank, (gathered, spread, received) in enumerate(found):
        assert all(torch.equal(*pair) for pair in zip(gathered, expected, strict=True))
        assert all(torch.equal(*pair) for pair in zip(spread, expected, strict=True))
        assert received[:, 0].tolist() == [100 * other + rank for other in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shifts_carry_words(size: int) -> None:
    def shift(group: PeerGroup) -> tuple[list[float], list[float]]:
        own, received, words = group.rank(), torch.empty(70_000), []
        to, source = (own + 1) % size, (own - 1) % size
        sent = torch.full((70_000,), float(own))
        group.exchange(sent, received, to, source, words=(own + 0.25,), received_words=words).wait(TIMEOUT_S)
        return received.unique().tolist(), words[:2]

    with members(size) as made:
        found = made.run(shift)
    assert found == [([float((rank - 1) % size)], [(rank - 1) % size + 0.25, 0.0]) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_who_closes_ends_the_collective_of_all(size: int) -> None:
    def reduce(group: PeerGroup) -> None:
        group.allreduce([torch.zeros(200_000)]).wait(60.0)
        if group.rank() == size - 1:
            time.sleep(0.2)
            group.close()
            return
        with pytest.raises(GroupFailed) as failure:
            group.allreduce([torch.zeros(200_000)]).wait(60.0)
        assert "in time" not in str(failure.value)
        # As a member that has failed does: only its neighbours notice by themselves.
        group.close()

    with members(size) as made:
        made.run(reduce)


def test_who_is_silent_is_waited_for_until_the_deadline() -> None:
    with members(2) as made:
        with pytest.raises(GroupFailed, match="in time"):
            made.groups[0].allreduce([torch.zeros(200_000)]).wait(0.3)
        with pytest.raises(GroupFailed, match="given up"):
            made.groups[0].allreduce([torch.zeros(200_000)]).wait(60.0, abandoned=lambda: True)


def test_members_in_different_collectives_fail() -> None:
    def run(group: PeerGroup) -> None:
        pending = group.allreduce([torch.zeros(10 + group.rank())])
        with pytest.raises(GroupFailed):
            pending.wait(TIMEOUT_S)
        group.close()

    with members(2) as made:
        made.run(run)


def test_a_released_group_is_closed_when_its_collective_is_over() -> None:
    with members(2) as made:
        one, other = made.groups
        waiting = threading.Thread(target=lambda: one.allreduce([torch.ones(3)]).wait(TIMEOUT_S), daemon=True)
        waiting.start()
        while not one.busy.locked():
            time.sleep(0.001)
        one.release()
        tensor = torch.ones(3)
        other.allreduce([tensor]).wait(TIMEOUT_S)
        waiting.join(TIMEOUT_S)
        assert tensor.tolist() == [2.0] * 3
        assert one.closed
        other.release()
        assert other.closed


@contextlib.contextmanager
def connections(size: int) -> Iterator[list[GroupConnections]]:
    """Of workers that find each other."""
    listeners = [Listener("127.0.0.1", identity=Identity(rank, "test")) for rank in range(size)]
    made = [GroupConnections(rank, listeners[rank], lambda to: listeners[to].address) for rank in range(size)]
    try:
        yield made
    finally:
        for each, listener in zip(made, listeners, strict=True):
            each.close()
            listener.close()


def test_members_connect_when_they_need_each_other() -> None:
    def reduce(each: GroupConnections) -> list[float]:
        group = each.group("some", (0, 1, 2))
        tensor = torch.full((LONG,), float(each.rank))
        group.allreduce([tensor]).wait(TIMEOUT_S)
        group.close()
        return tensor.unique().tolist()

    with connections(3) as found, ThreadPoolExecutor(3) as threads:
        assert list(threads.map(reduce, found)) == [[3.0]] * 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_connects_to_a_member_that_has_left_does_not_wait_for_it(when: str) -> None:
    with connections(2) as found:
        group = found[1].group("some", (0, 1))
        with ThreadPoolExecutor(1) as threads:
            if when == "before":
                # As a member does that closes its group, or stopped waiting for the others to be ready.
                found[0].refuse("some")
            waiting = threads.submit(group.allreduce([torch.zeros(1)]).wait, TIMEOUT_S)
            if when == "after":
                while not found[0]._parked:
                    time.sleep(0.001)
                found[0].refuse("some")
            with pytest.raises(GroupFailed) as failure:
                waiting.result()
        assert "in time" not in str(failure.value)
        group.close()

        def reduce(each: GroupConnections) -> None:
            other = each.group("another", (0, 1))
            other.allreduce([torch.zeros(1)]).wait(TIMEOUT_S)
            other.close()

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(reduce, found))


def test_who_waits_for_a_connection_notices_that_it_will_not_come() -> None:
    with connections(1) as found:
        group = found[0].group("some", (0, 1), hopeless=lambda rank: rank == 1)
        with pytest.raises(GroupFailed, match="worker 1 will not connect"):
            group.allreduce([torch.zeros(1)]).wait(TIMEOUT_S)


def test_who_waits_for_a_connection_notices_that_its_group_was_closed() -> None:
    with connections(1) as found:
        group = found[0].group("some", (0, 1))
        threading.Timer(0.2, group.close).start()
        with pytest.raises(GroupFailed, match="closed"):
            group.allreduce([torch.zeros(1)]).wait(TIMEOUT_S)
