"""Which workers a collective waits for when workers die and join."""

import re

import pytest
import torch

from gossamer.effects import Gather, Mean
from gossamer.errors import MethodError
from gossamer.virtual.comm.rendezvous import Rendezvous, RendezvousTable


class FakeWorker:
    def __init__(self, rank):
        self.rank, self.alive = rank, True
        self.last_rounds, self.own_last_rounds = {}, {}


class Workers:
    def __init__(self, num_workers):
        self.workers = [FakeWorker(rank) for rank in range(num_workers)]
        self.completed = completed = []

        class Noted(Rendezvous):
            def complete(self):
                completed.append((self.round, sorted(self.arrived)))

        make = lambda effect, members, part: Noted(effect, members, part, "mine")  # noqa: E731
        self.table = RendezvousTable(self.workers, make, "mine")

    def arrive(self, rank, round, group=None, kind=Mean, topic="model", size=1):
        content = torch.zeros(size) if kind is Mean else (torch.zeros(size),)
        effect = kind(content, round=round, group=group, topic=topic)
        self.table.arrive(self.workers[rank], effect, lambda answer: None, "step")

    def die(self, rank):
        self.workers[rank].alive = False
        self.table.on_membership_change(left=rank)

    def join(self, rank, peer):
        worker = self.workers[rank]
        worker.alive, worker.last_rounds = True, dict(self.workers[peer].last_rounds)
        worker.own_last_rounds = {}
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
def test_after_training_what_is_open_does_without_the_missing_workers(group):
    workers = Workers(3)
    workers.arrive(0, 7, group)
    workers.table.end_training()
    # The rounds begin anew, and what was left is apart.
    workers.arrive(0, 3, group)
    workers.arrive(1, 3, group)
    assert workers.completed == ([(3, [0, 1])] if group else [])
    assert workers.table.complete_left_over()
    assert workers.completed[-1] == (7, [0])
    assert not workers.table.complete_left_over()


def refused(pattern):
    return pytest.raises(MethodError, match="^" + re.escape(pattern) + "$")


SAME_ORDER = ": all members must yield the same collectives in the same order"


@pytest.mark.parametrize("group", [None, (0, 1)])
def test_a_worker_that_skips_a_round_in_which_another_waits_is_refused(group):
    workers = Workers(3)
    workers.arrive(0, 5, group)
    where = "Mean 'model' round 5" + (" of workers 0, 1" if group else "")
    with refused(f"method mine: worker 0 waits in {where}, worker 1 is in round 6{SAME_ORDER}"):
        workers.arrive(1, 6, group)


def test_a_worker_that_yields_another_kind_is_refused():
    workers = Workers(2)
    workers.arrive(1, 2, kind=Gather)
    with refused(
        f"method mine: worker 1 waits in Gather 'model' round 2, worker 0 is in Mean 'model' round 2{SAME_ORDER}"
    ):
        workers.arrive(0, 2)


@pytest.mark.parametrize("last", [0, 1])
def test_a_member_that_was_in_another_group_of_the_same_round_is_refused(last):
    workers = Workers(4)
    workers.arrive(0, last, (0, 2))
    with refused(
        f"method mine: worker 0 waits in Mean 'model' round {last} of workers 0, 2, worker 1 is in Mean 'model' round "
        f"0 of workers 0, 1{SAME_ORDER}"
    ):
        workers.arrive(1, 0, (0, 1))
    workers.arrive(2, last, (0, 2))
    with refused(
        f"method mine: worker 0 is in round {last}, worker 1 is in Mean 'model' round 0 of workers 0, 1{SAME_ORDER}"
    ):
        workers.arrive(1, 0, (0, 1))


def test_rounds_that_a_worker_missed_before_it_joined_do_without_it():
    """It joined with the rounds of a peer that is ahead; a slow worker comes to an earlier round with it later on."""
    workers = Workers(4)
    workers.workers[3].alive = False
    for rank in (0, 1):
        workers.arrive(rank, 5, (0, 1))
    workers.join(3, peer=0)
    for rank in (0, 3):
        workers.arrive(rank, 6, (0, 3))
    workers.arrive(2, 4, (2, 3))
    assert workers.completed == [(5, [0, 1]), (6, [0, 3]), (4, [2])]


@pytest.mark.parametrize("again", [3, 2])
def test_rounds_ascend(again):
    workers = Workers(2)
    for rank in range(2):
        workers.arrive(rank, 3)
    workers.arrive(0, 0, topic="other")
    with refused(
        f"step of method mine on worker 1 yielded Mean 'model' round {again} after round 3: the rounds of a topic "
        "ascend from 0; use another topic beside it"
    ):
        workers.arrive(1, again)
    with refused(
        "step of method mine on worker 1 yielded Mean 'new' round -1 as its first: the rounds of a topic ascend from "
        "0; use another topic beside it"
    ):
        workers.arrive(1, -1, topic="new")


def test_members_that_send_different_lengths_are_refused():
    workers = Workers(2)
    workers.arrive(1, 0, size=4)
    with refused(
        "method mine: worker 1 sends 4 float32 in Mean 'model' round 0, worker 0 sends 5 float32: both must send the "
        "same lengths and dtypes"
    ):
        workers.arrive(0, 0, size=5)


@pytest.mark.parametrize("group", [(1, 0), (0, 0), (0, 3), [0, 1], (-1, 0)])
def test_groups_are_ascending_ranks(group):
    with refused(
        f"step of method mine on worker 0 yielded Mean 'model' round 0 of workers {', '.join(map(str, group))} in "
        f"group {group!r}: expected a tuple of ranks in ascending order"
    ):
        Workers(3).arrive(0, 0, group)


def test_a_worker_outside_of_its_group_is_refused():
    with refused(
        "step of method mine on worker 2 yielded Mean 'model' round 0 of workers 0, 1 in which it is not: yield it on "
        "the members only"
    ):
        Workers(3).arrive(2, 0, (0, 1))
