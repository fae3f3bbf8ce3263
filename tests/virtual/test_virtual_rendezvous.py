"""Which workers a collective waits for when workers die and join."""

import pytest
import torch

from gossamer.effects import Mean
from gossamer.virtual.sim.rendezvous import RendezvousTable


class FakeWorker:
    def __init__(self, rank):
        self.rank, self.alive, self.last_rounds = rank, True, {}


class Workers:
    def __init__(self, num_workers):
        self.workers = [FakeWorker(rank) for rank in range(num_workers)]
        self.completed = []
        self.table = RendezvousTable(
            self.workers, lambda rendezvous: self.completed.append((rendezvous.round, sorted(rendezvous.arrived)))
        )

    def arrive(self, rank, round, group=None):
        self.table.arrive(self.workers[rank], Mean(torch.zeros(1), round=round, group=group), lambda answer: None)

    def die(self, rank):
        self.workers[rank].alive = False
        self.table.on_membership_change(left=rank)

    def join(self, rank, peer):
        worker = self.workers[rank]
        worker.alive, worker.last_rounds = True, dict(self.workers[peer].last_rounds)
        self.table.on_membership_change()


def test_a_rendezvous_is_complete_when_all_have_arrived():
    workers = Workers(3)
    for rank in (2, 0):
        workers.arrive(rank, 0)
        assert workers.completed == []
    workers.arrive(1, 0)
    assert workers.completed == [(0, [0, 1, 2])]


def test_rounds_and_groups_do_not_mix():
    workers = Workers(4)
    workers.arrive(0, 0, (0, 1))
    workers.arrive(2, 0, (2, 3))
    workers.arrive(1, 0, (0, 1))
    workers.arrive(0, 1, (0, 3))
    assert workers.completed == [(0, [0, 1])]
    workers.arrive(3, 0, (2, 3))
    workers.arrive(3, 1, (0, 3))
    assert workers.completed == [(0, [0, 1]), (0, [2, 3]), (1, [0, 3])]


def test_dead_workers_are_not_expected_and_their_contribution_is_dropped():
    workers = Workers(3)
    workers.arrive(0, 0)
    workers.arrive(1, 0)
    workers.die(1)
    assert workers.completed == []
    workers.die(2)
    assert workers.completed == [(0, [0])]


def test_a_worker_that_joins_is_expected_from_the_next_round_on():
    workers = Workers(3)
    workers.workers[2].alive = False
    workers.arrive(0, 5)
    workers.join(2, peer=0)
    workers.arrive(1, 5)
    assert workers.completed == [(5, [0, 1])]
    workers.arrive(0, 6)
    workers.arrive(1, 6)
    assert len(workers.completed) == 1
    workers.arrive(2, 6)
    assert workers.completed[1] == (6, [0, 1, 2])


def test_a_worker_that_joins_and_arrives_unexpected_does_not_replace_a_straggler():
    """It has its peer's last rounds, and arrives in a round that still waits for a slow worker."""
    workers = Workers(3)
    workers.workers[2].alive = False
    workers.arrive(0, 0)
    workers.join(2, peer=0)
    workers.arrive(2, 0)
    assert workers.completed == [], "worker 1 is still expected"
    workers.arrive(1, 0)
    assert workers.completed == [(0, [0, 1, 2])]


@pytest.mark.parametrize("group", [None, (0, 1)])
def test_complete_all_does_without_the_missing_workers(group):
    workers = Workers(3)
    workers.arrive(0, 0, group)
    assert workers.table.complete_all()
    assert workers.completed == [(0, [0])]
    assert not workers.table.complete_all()
