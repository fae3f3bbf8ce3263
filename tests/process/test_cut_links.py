"""Links that are cut though both of their ends are alive: who notices, and who is in a view with whom."""

import pytest

from gossamer.process.liveness.peer import Peer, Timing
from gossamer.process.liveness.reachability import MAX_ASKED, Reachability
from gossamer.process.liveness.records import first_record
from gossamer.process.views.grouping import Grouping, divide

TIMING = Timing()


@pytest.mark.parametrize(
    ("unreachable", "groups"),
    [
        ({}, [[0, 1, 2, 3]]),
        ({1: (2,)}, [[0, 1, 3], [2]]),
        # The other end may not have noticed yet, or have noticed first.
        ({2: (1,)}, [[0, 1, 3], [2]]),
        # Whoever has most cut links leaves, also if that is the lowest rank.
        ({0: (1, 2)}, [[1, 2, 3], [0]]),
        ({0: (1, 2, 3)}, [[1, 2, 3], [0]]),
        # Two sides, whose workers all reach each other.
        ({0: (2, 3), 1: (2, 3)}, [[0, 1], [2, 3]]),
        # A chain: who is left out forms a group with whom it reaches.
        ({0: (2, 3), 1: (3,)}, [[0, 1], [2, 3]]),
        ({0: (1, 2, 3), 1: (2, 3), 2: (3,)}, [[0], [1], [2], [3]]),
        # What is said about a worker that is not there does not count.
        ({0: (7,), 7: (1, 2)}, [[0, 1, 2, 3]]),
    ],
)
def test_workers_are_divided_into_groups_that_reach_each_other(
    unreachable: dict[int, tuple[int, ...]], groups: list[list[int]]
) -> None:
    assert divide([3, 1, 0, 2], unreachable) == groups


def test_the_dead_are_in_no_group() -> None:
    dead: set[int] = set()
    grouping = Grouping(0, range(3), dead.__contains__)
    grouping.hear(1, (2,))
    assert (grouping.groups, grouping.apart, grouping.cut_links()) == ([[0, 1], [2]], {2}, [(1, 2)])
    dead.add(1)
    grouping.renew()
    assert (grouping.groups, grouping.apart, grouping.cut_links()) == ([], frozenset(), [])


class Peers:
    """Workers whose heartbeats and answers come, or do not."""

    def __init__(self, number: int = 2) -> None:
        self.peers = {rank: Peer(0.0) for rank in range(1, number)}
        self.now = 10.0
        for rank, peer in self.peers.items():
            peer.record = first_record(rank, 1, ("a", 1))
        self.reachability = Reachability(self.peers, TIMING)
        self.reachability.tick(self.now)

    def go_on(self, seconds: float, moves: bool, answers: bool) -> list[int]:
        pinged: list[int] = []
        for _ in range(round(seconds / TIMING.tick_s)):
            self.now += TIMING.tick_s
            for peer in self.peers.values():
                peer.moved_at = self.now if moves else peer.moved_at
                peer.answered_at = self.now if answers else peer.answered_at
            pinged += self.reachability.tick(self.now)
        return pinged


def test_a_worker_that_is_heard_of_and_does_not_answer_cannot_be_reached() -> None:
    peers = Peers()
    assert not peers.go_on(5.0, moves=True, answers=False), "nobody waits for it"
    peers.reachability.ask([1], peers.now)
    assert peers.go_on(TIMING.cut_s - 0.1, moves=True, answers=False)
    assert peers.reachability.unreachable == ()
    peers.go_on(0.2, moves=True, answers=False)
    assert peers.reachability.unreachable == (1,)
    assert peers.go_on(5.0, moves=True, answers=False), "it is looked for"
    # One answer is not enough: a link that comes and goes would cost a view each time.
    peers.go_on(0.1, moves=True, answers=True)
    peers.go_on(2.0, moves=True, answers=False)
    assert peers.reachability.unreachable == (1,)
    peers.go_on(TIMING.whole_s + 0.2, moves=True, answers=True)
    assert peers.reachability.unreachable == ()


def test_a_worker_that_stands_still_is_no_cut_link() -> None:
    peers = Peers()
    peers.reachability.ask([1], peers.now)
    peers.go_on(3.0, moves=False, answers=False)
    # It goes on, and others hear of it first.
    peers.go_on(TIMING.cut_s - 0.3, moves=True, answers=False)
    peers.go_on(0.1, moves=True, answers=True)
    assert peers.reachability.unreachable == ()
    assert not peers.go_on(1.0, moves=True, answers=True), "it has answered"


def test_who_stood_still_itself_asks_again() -> None:
    peers = Peers()
    peers.reachability.ask([1], peers.now)
    peers.go_on(1.0, moves=True, answers=False)
    peers.now += 5.0
    peers.go_on(0.1, moves=True, answers=False)
    assert peers.reachability.unreachable == ()


def test_few_are_asked_at_once() -> None:
    peers = Peers(30)
    peers.reachability.ask(range(30), peers.now)
    peers.reachability.ask(range(30), peers.now)
    assert len(peers.reachability.tick(peers.now + 0.1)) == MAX_ASKED


def test_a_cut_link_ends_with_its_other_end() -> None:
    peers = Peers()
    peers.reachability.ask([1], peers.now)
    peers.go_on(TIMING.cut_s + 0.2, moves=True, answers=False)
    peers.peers[1].dead = True
    peers.go_on(0.1, moves=False, answers=False)
    assert peers.reachability.unreachable == ()
