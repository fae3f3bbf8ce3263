"""Workers that come to a run under way, and workers that leave it for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import leaving_script
import pytest
from real_workers import RealWorkers, Report

from gossamer.methods import METHODS
from gossamer.methods import build as build_method
from gossamer.process.liveness.actions import Change, Notice
from gossamer.process.liveness.liveness import Liveness
from gossamer.process.liveness.records import Kind, Message, Stage, first_record
from gossamer.process.net.connection import connect
from gossamer.process.net.greeting import ANY_RUN, Reason, Refused
from gossamer.process.net.identity import Identity
from gossamer.process.net.listener import Listener
from gossamer.process.roster.placement import place
from gossamer.process.roster.roster import KnownRoster, Roster, read_roster
from gossamer.process.roster.roster_store import take_rank
from gossamer.process.store.introduction import Introduction, ask, introduce
from gossamer.topology import build, resized

SECRET = b"a secret of enough bytes"


def test_rosters_merge_in_any_order():
    first = Roster(3)
    came, left = replace_came(first, 3, 5), first._replace(left=frozenset({0}))
    assert came.merged(left) == left.merged(came) == Roster(3, frozenset({3, 5}), frozenset({0}))
    assert came.merged(left).ranks == (1, 2, 3, 5)
    # Who has left does not come back, whatever is heard late.
    assert left.merged(first).ranks == (1, 2)
    assert read_roster(came.merged(left).to_text().encode()) == came.merged(left)


def replace_came(roster: Roster, *ranks: int) -> Roster:
    return roster._replace(came=frozenset(ranks))


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"first": "3", "came": [], "left": []}', b'{"first": 2, "came": [-1], "left": []}']
)
def test_a_roster_that_cannot_be_read_is_none(text: bytes):
    assert read_roster(text) is None


def test_what_is_known_of_the_roster_changes_once_for_each_news():
    known, seen = KnownRoster(Roster(2)), []
    known.on_change.append(lambda before, after: seen.append(after.ranks))
    known.learn_came([0, 1, 2])
    known.learn_came([2])
    known.learn_left(0)
    assert seen == [(0, 1, 2), (1, 2)]
    assert list(known) == [1, 2]
    assert 0 not in known


def test_positions_have_no_gaps():
    placement = place(build("ring", workers=4), (1, 2, 5, 7, 8))
    assert [placement.position(rank) for rank in (1, 2, 5, 7, 8)] == [0, 1, 2, 3, 4]
    assert placement.neighbours(1) == (2, 8)
    assert placement.neighbours(7) == (5, 8)
    assert placement.neighbours(0) == ()
    assert placement.to_ranks((0, 4, 5)) == (1, 8)


def test_a_topology_of_another_size():
    torus = build("torus:2x3")
    assert resized(torus, 6) is torus
    assert (resized(torus, 8).name, resized(torus, 8).workers) == ("torus", 8)
    # There is no hypercube of five.
    assert (resized(build("hypercube", workers=4), 5).name, resized(build("hypercube", workers=4), 8).name) == (
        "ring",
        "hypercube",
    )
    assert resized(build("ring", workers=3), 1).workers == 1


def test_the_constants_of_a_method_follow_the_topology():
    small, large = build("ring", workers=4), build("ring", workers=16)
    kind = METHODS["a2cid2"]
    method, fresh = build_method(kind, kind.Config(), small), build_method(kind, kind.Config(), large)
    assert vars(method)["eta"] != vars(fresh)["eta"]
    method.on_topology_change(large)
    assert vars(method) == vars(fresh)


def test_a_worker_that_nobody_knew_is_added_and_one_that_retires_is_said():
    machine = Liveness(first_record(0, 1, ("a", 1)), 2, 0.0)
    new = first_record(4, 7, ("b", 2))._replace(changes=1)
    machine.receive(4, Message(Kind.GOSSIP, (new,)), 1.0)
    assert Notice(Change.CAME, 4) in machine.actions
    machine.actions.clear()
    machine.receive(4, Message(Kind.GOSSIP, (new._replace(changes=2, stage=Stage.RETIRED),)), 1.1)
    assert Notice(Change.RETIRED, 4) in machine.actions
    machine.remove(4)
    machine.actions.clear()
    machine.receive(1, Message(Kind.GOSSIP, (first_record(1, 1, ("c", 3)), new._replace(changes=3))), 1.2)
    assert machine.record(4) is None
    assert not [action for action in machine.actions if action == Notice(Change.CAME, 4)]


class Counter:
    """A store that only counts."""

    def __init__(self, given: int) -> None:
        self.given = given

    def add(self, key: str, amount: int) -> int:
        self.given += amount
        return self.given


def test_ranks_are_given_once():
    store = Counter(0)
    assert [take_rank(store, Roster(4)) for _ in range(3)] == [4, 5, 6]  # type: ignore[arg-type]
    # A store that has replaced another has forgotten how many were given.
    assert take_rank(Counter(0), replace_came(Roster(4), 4, 6)) == 7  # type: ignore[arg-type]


def test_a_stranger_with_the_secret_is_introduced_and_gets_nothing_else():
    identity = Identity(0, "the run", SECRET)
    listener = Listener("127.0.0.1", identity=identity)
    try:
        introduce(listener, lambda: (("home", 1), ("127.0.0.1", 2)))
        listener.register("store", lambda connection, hello: connection.close())
        assert ask(listener.address, SECRET, None, 10.0) == Introduction("the run", ("home", 1), ("127.0.0.1", 2))
        with pytest.raises(Refused) as refused:
            ask(listener.address, b"another secret of enough bytes", None, 10.0)
        assert refused.value.reason == Reason.WRONG_PROOF
        stranger = replace(identity, rank=None, run=ANY_RUN)
        with pytest.raises(Refused) as refused:
            connect(listener.address, "store", b"", identity=stranger, timeout_s=10.0)
        assert refused.value.reason == Reason.UNKNOWN_PURPOSE
    finally:
        listener.close()


def good(ends: list[Report]) -> None:
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95
    assert [end["threads"] for end in ends] == [[]] * len(ends)
    assert [end["missing"] for end in ends] == [[]] * len(ends)


@pytest.mark.parametrize("method", ["a2cid2", "allreduce"])
def test_workers_come_and_leave_for_good(method: str, tmp_path: Path):
    """The first to leave hosts the store. A worker that differs is refused, and disturbs nobody."""
    order = {"method": method, "steps": 100_000, "until": tmp_path / "enough", "leave": tmp_path}
    with RealWorkers(2, **order) as workers:
        workers[0].step(20)
        workers.order = {**order, "settings": {"seed": 1}}
        assert "differs in seed" in workers.grow(1)[0].at("refused")["why"]
        workers.order = order
        given = [worker.at("joined")["rank"] for worker in workers.grow(2)]
        for worker in workers.workers[3:]:
            worker.exchanged()
        (tmp_path / "leave 0").touch()
        workers[0].at("left")
        for worker in (workers[1], *workers.workers[3:]):
            worker.said("worker 0 has left for good")
            worker.step(worker.reports[-1]["step"] + 20)
        (tmp_path / "enough").touch()
        ends = workers.finished([1, 3, 4])
    assert sorted(given) == [3, 4]  # the one that was refused had been given 2
    assert workers[0].process.exitcode == 0
    assert any(event.startswith("the run has 3 workers now") for event in ends[0]["events"])
    good(ends)


def test_steps_until_the_others_have_all():
    def steps(name: str, **settings: int) -> list[int]:
        kind = METHODS[name]
        method = build_method(kind, kind.Config(**settings), build("ring", workers=4))
        return [method.steps_until_shared(step) for step in (0, 1, 4, 6)]

    assert steps("allreduce") == steps("sgp") == [0, 0, 0, 0]
    assert steps("overlap") == steps("sgp", overlap=True) == [1, 1, 1, 1]
    assert steps("localsgd", period=4) == steps("diloco", period=4) == [0, 3, 0, 2]
    # An average that has begun has to arrive; fragments are averaged one after the other.
    assert steps("diloco", period=4, delay=1) == [1, 4, 1, 3]
    assert steps("diloco", period=4, fragments=2) == [4, 4, 4, 4]


PERIOD = {"period": leaving_script.PERIOD}


@pytest.mark.parametrize(
    ("method", "settings", "shares", "weight"),
    [
        ("localsgd", PERIOD, False, 2.5),
        ("lasgd", PERIOD, False, 2.5),
        ("diloco", PERIOD, False, 2.625),
        # Each averaging arrives in the next step.
        ("overlap", {}, True, 2.5),
        ("sgp", {}, True, 2.5),
        ("sgp", {"overlap": True}, True, 2.5),
    ],
)
def test_what_a_worker_did_since_the_last_average_is_in_the_next_one_when_it_leaves(
    method: str, settings: dict[str, Any], shares: bool, weight: float
):
    order = {"method": method, "settings": settings, "shares": shares, "late_s": 2.0 if shares else 0.0}
    with RealWorkers(2, script=leaving_script.train, **order) as workers:
        stays, leaves = (worker.at("trained") for worker in workers)
        for worker in workers:
            worker.process.join(60)
    assert stays["weight"] == weight
    assert leaves["steps"] == leaving_script.LEAVES_AFTER
    assert not any("last steps" in event or "any gradient" in event for event in leaves["events"])


def test_a_worker_leaves_while_the_others_keep_it_waiting(tmp_path: Path):
    goes_on = tmp_path / "goes on"
    order = {"method": "localsgd", "settings": {"period": 8}, "hand_over_s": 5.0, "goes_on": goes_on}
    with RealWorkers(2, script=leaving_script.train, **order) as workers:
        leaves = workers[1].at("trained", 60)
        workers[1].process.join(60)
        goes_on.touch()
        stays = workers[0].at("trained", 60)
        workers[0].process.join(60)
    assert [worker.process.exitcode for worker in workers] == [0, 0]
    assert any("the others do not have this worker's last steps" in event for event in leaves["events"])
    assert stays["weight"] == 0.0
