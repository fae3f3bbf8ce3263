"""Who is waited for in an averaging when workers come and go."""

import pytest
import torch

from gossamer.effects import Mean
from gossamer.virtual.sim.rendezvous import RendezvousTable


class Someone:
    def __init__(self, rank):
        self.rank, self.alive, self.contributed = rank, True, {}


class Hall:
    def __init__(self, workers):
        self.workers = [Someone(rank) for rank in range(workers)]
        self.held = []
        self.meetings = RendezvousTable(
            self.workers, lambda meeting: self.held.append((meeting.round, sorted(meeting.came)))
        )

    def come(self, rank, round, group=None):
        self.meetings.come(self.workers[rank], Mean(torch.zeros(1), round=round, group=group), lambda answer: None)


def test_a_meeting_is_held_when_all_have_come():
    hall = Hall(3)
    for rank in (2, 0):
        hall.come(rank, 0)
        assert hall.held == []
    hall.come(1, 0)
    assert hall.held == [(0, [0, 1, 2])]


def test_rounds_and_groups_do_not_mix():
    hall = Hall(4)
    hall.come(0, 0, (0, 1))
    hall.come(2, 0, (2, 3))
    hall.come(1, 0, (0, 1))
    hall.come(0, 1, (0, 3))
    assert hall.held == [(0, [0, 1])]
    hall.come(3, 0, (2, 3))
    hall.come(3, 1, (0, 3))
    assert hall.held == [(0, [0, 1]), (0, [2, 3]), (1, [0, 3])]


def test_the_dead_are_not_waited_for_and_what_they_brought_does_not_count():
    hall = Hall(3)
    hall.come(0, 0)
    hall.come(1, 0)
    hall.workers[1].alive = False
    hall.meetings.changed(left=1)
    assert hall.held == []
    hall.workers[2].alive = False
    hall.meetings.changed(left=2)
    assert hall.held == [(0, [0])]


def test_one_that_joins_is_waited_for_from_the_next_round_on():
    hall = Hall(3)
    hall.workers[2].alive = False
    hall.come(0, 5)
    hall.workers[2].alive, hall.workers[2].contributed = True, dict(hall.workers[0].contributed)
    hall.meetings.changed()
    hall.come(1, 5)
    assert hall.held == [(5, [0, 1])]
    hall.come(0, 6)
    hall.come(1, 6)
    assert len(hall.held) == 1
    hall.come(2, 6)
    assert hall.held[1] == (6, [0, 1, 2])


def test_one_that_joins_and_comes_unexpected_does_not_take_the_place_of_a_straggler():
    """It took over how far its peer is, and comes to a round that still waits for a slow worker."""
    hall = Hall(3)
    hall.workers[2].alive = False
    hall.come(0, 0)
    hall.workers[2].alive, hall.workers[2].contributed = True, dict(hall.workers[0].contributed)
    hall.meetings.changed()
    hall.come(2, 0)
    assert hall.held == [], "worker 1 is still expected"
    hall.come(1, 0)
    assert hall.held == [(0, [0, 1, 2])]


@pytest.mark.parametrize("group", [None, (0, 1)])
def test_closing_holds_what_is_open_with_those_who_have_come(group):
    hall = Hall(3)
    hall.come(0, 0, group)
    assert hall.meetings.close()
    assert hall.held == [(0, [0])]
    assert not hall.meetings.close()
