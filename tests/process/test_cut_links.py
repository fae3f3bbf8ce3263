"""Links that are cut though both of their ends are alive: who notices, and who is in a view with whom."""

import threading
from types import SimpleNamespace

import pytest
import torch

from gossamer.api import join
from gossamer.errors import InputError
from gossamer.process.events import EventKind, Events
from gossamer.process.lifecycle import Lifecycle, Phase
from gossamer.process.liveness.peer import Peer, Timing
from gossamer.process.liveness.reachability import MAX_PROBED, Reachability
from gossamer.process.liveness.records import first_record
from gossamer.process.runtime.partition_policy import CONTINUE, MAJORITY, PartitionPolicy
from gossamer.process.views import grouping as views_grouping
from gossamer.process.views.grouping import WHOLE, Division, Grouping, divide

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
    grouping.renew()
    assert grouping.division == ([[0, 1], [2]], [(1, 2)], {2})
    dead.add(1)
    grouping.renew()
    assert grouping.division == WHOLE


def test_workers_are_divided_once_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many workers only those are looked at whose links are cut."""
    divided: list[int] = []
    monkeypatch.setattr(
        views_grouping, "divide", lambda ranks, unreachable: divided.append(1) or divide(ranks, unreachable)
    )
    grouping = Grouping(0, range(2000), lambda rank: False)
    for _ in range(50):
        grouping.hear(1, (1998, 1999))
        grouping.hear(2, (1999,))
        grouping.renew()
    assert len(divided) == 1
    assert grouping.division.links == [(1, 1998), (1, 1999), (2, 1999)]
    assert grouping.division.groups[1:] == [[1998, 1999]]
    grouping.hear(2, ())
    grouping.hear(1, ())
    grouping.renew()
    assert grouping.division == WHOLE


def test_what_is_said_of_cut_links_is_of_one_moment() -> None:
    """The loop may divide the workers anew between two looks at them."""

    class Changing:
        """Whole when it is looked at again."""

        looks = 0

        @property
        def division(self) -> Division:
            self.looks += 1
            return Division([[0, 1], [2]], [(1, 2)], frozenset({2})) if self.looks == 1 else WHOLE

        groups = property(lambda self: self.division.groups)

        def cut_links(self) -> list[tuple[int, int]]:
            return [(1, 2)]

    events = Events(0)
    heartbeats = SimpleNamespace(everybody=range(3), lost=frozenset())
    PartitionPolicy(CONTINUE, heartbeats, Changing(), events, Lifecycle()).poll()  # type: ignore[arg-type]
    (event,) = events
    assert "workers 1 and 2 cannot reach each other" in str(event)


def test_a_pause_ends_with_the_training() -> None:
    heartbeats = SimpleNamespace(everybody=range(3), lost=frozenset({1, 2}))
    grouping, lifecycle, events = Grouping(0, range(3), {1, 2}.__contains__), Lifecycle(), Events(0)
    policy = PartitionPolicy(MAJORITY, heartbeats, grouping, events, lifecycle)  # type: ignore[arg-type]
    threading.Timer(0.2, lambda: lifecycle.advance(Phase.STOPPED)).start()
    waiting = threading.Thread(target=policy.wait, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    assert [event.kind for event in events] == [EventKind.PAUSED]


def test_an_error_ends_a_pause_and_is_raised() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swarm = join(model, optimizer, method="allreduce", partition="majority")
    swarm._runtime._policy.may_train = lambda: False  # type: ignore[method-assign]
    failed = InputError("rank 0 was given to two processes")
    threading.Timer(0.2, lambda: swarm._runtime.driver.fail(failed)).start()
    try:
        model(torch.ones(1)).sum().backward()
        with pytest.raises(InputError, match="given to two"):
            optimizer.step()
        assert swarm.metrics().steps == 0
    finally:
        swarm.close()


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
    peers.reachability.probe([1], peers.now)
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
    peers.reachability.probe([1], peers.now)
    peers.go_on(3.0, moves=False, answers=False)
    # It goes on, and others hear of it first.
    peers.go_on(TIMING.cut_s - 0.3, moves=True, answers=False)
    peers.go_on(0.1, moves=True, answers=True)
    assert peers.reachability.unreachable == ()
    assert not peers.go_on(1.0, moves=True, answers=True), "it has answered"


def test_who_stood_still_itself_probes_again() -> None:
    peers = Peers()
    peers.reachability.probe([1], peers.now)
    peers.go_on(1.0, moves=True, answers=False)
    peers.now += 5.0
    peers.go_on(0.1, moves=True, answers=False)
    assert peers.reachability.unreachable == ()


def test_few_are_probed_at_once() -> None:
    peers = Peers(30)
    peers.reachability.probe(range(30), peers.now)
    peers.reachability.probe(range(30), peers.now)
    assert len(peers.reachability.tick(peers.now + 0.1)) == MAX_PROBED


def test_a_cut_link_ends_with_its_other_end() -> None:
    peers = Peers()
    peers.reachability.probe([1], peers.now)
    peers.go_on(TIMING.cut_s + 0.2, moves=True, answers=False)
    peers.peers[1].dead = True
    peers.go_on(0.1, moves=False, answers=False)
    assert peers.reachability.unreachable == ()
