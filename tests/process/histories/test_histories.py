"""Histories of the protocol between workers: the invariants hold, planted bugs are found, a loss is noticed fast."""

import random

import planted_liveness
import planted_views
import pytest

from gossamer.process.liveness.liveness import Liveness
from gossamer.process.liveness.peer import Timing
from gossamer.process.liveness.records import Kind, Message, Record, Stage, first_record, from_bytes, to_bytes
from gossamer.process.liveness.ring import Ring
from gossamer.process.state.lineage import ViewId
from gossamer.process.views import messages
from gossamer.process.views.messages import Member, ViewKind, ViewMessage
from gossamer.testing.histories import __main__ as command
from gossamer.testing.histories.crowd import run_crowd
from gossamer.testing.histories.history import run_history
from gossamer.testing.histories.network import LinkQuality
from gossamer.testing.histories.world import World

NUM_HISTORIES = 2000
NUM_PARTS = 8
MAX_UNTIL_FOUND = 10_000

BUGS = {**planted_liveness.BUGS, **planted_views.BUGS}
FIRST_SEEDS = {
    "ItsOwnPauseCounts": 1760,
    "TheSilentAreNotAsked": 20,
    "WhoAnswersLives": 30,
    "NumbersAreNotRaised": 65,
    "WhatWasOnItsWayRevives": 590,
    "TheDeadStayMembers": 80,
    "ARankIsAMember": 30,
    "TheDeadAreWaitedFor": 125,
    "TheCoordinatorIsForEver": 80,
    "CutLinksDoNotCount": 20,
    "OnlyTheOwnLinksCount": 20,
    "CutLinksStayCut": 25,
}
"""Shortly before a history that finds the bug, where that is not one of the first."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_invariants_hold_in_all_histories(part):
    found = []
    for seed in range(part, NUM_HISTORIES, NUM_PARTS):
        result = run_history(seed)
        if result.violation is not None:
            found.append(f"seed {seed}: {result.violation}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("seed", [3767, 73786, 106118, 109692, 1005165, 1013497, 1014210])
def test_what_is_known_late_or_kept_on_purpose_is_no_violation(seed):
    """A new process found in the store, what had waited for a stopped worker, a pause of those that are too few, one
    of many workers that hangs, a cut link between workers that were apart until another one died, one whose last link
    to a worker has just ended."""
    assert run_history(seed).violation is None


@pytest.mark.parametrize("seed", [9955, 64383])
def test_links_that_are_cut_where_groups_meet_anew_are_found_one_after_the_other(seed):
    assert run_history(seed).violation is None


def test_a_worker_that_goes_on_takes_nobody_for_dead_for_an_old_message():
    assert run_history(139434).violation is None


@pytest.mark.parametrize("seed", [70385, 1005656])
def test_several_links_that_are_cut_at_once_are_found_at_once(seed):
    assert run_history(seed).violation is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name):
    first = FIRST_SEEDS.get(name, 0)
    for seed in range(first, first + MAX_UNTIL_FOUND):
        if run_history(seed, BUGS[name]).violation is not None:
            return
    raise AssertionError(f"{name} was not found in {MAX_UNTIL_FOUND} histories")


def test_a_history_is_the_same_each_time():
    lines = [[], []]
    for log in lines:
        run_history(31, log=log.append)
    assert lines[0] == lines[1]
    assert len(lines[0]) > 5


def test_the_command_prints_a_history(capsys):
    assert command.main(["--seed", "31"]) == 0
    printed = capsys.readouterr().out
    assert "worker 0 starts" in printed
    assert printed.endswith("all invariants hold\n")
    assert " → " not in printed
    assert command.main(["--seed", "31", "--messages"]) == 0
    assert "→ 0: present for train, requested 0" in capsys.readouterr().out


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [16, 64, 256])
def test_all_know_of_a_death_within_two_seconds_and_of_news_within_milliseconds(workers):
    world = World(3, workers, LinkQuality(min_delay_s=0.001, max_delay_s=0.001), timing=Timing())
    lost = 2 * workers // 3
    for rank in range(workers):
        world.start(rank)
    world.queue.run_until(3.0)
    world.request(11, 7)
    world.queue.run_until(world.now + 0.03)
    assert {process.machine.own.requests[0] for process in world.processes.values()} == {7}
    assert not any(process.said for process in world.processes.values())
    before = world.network.num_messages
    world.queue.run_until(world.now + 1.0)
    # Four neighbours, five times a second, and no more.
    assert world.network.num_messages - before < workers * 4 * 6
    world.crash(lost)
    world.queue.run_until(world.now + 2.0)
    assert {process.machine.dead(lost) for process in world.processes.values()} == {True}
    # Its last heartbeats travel on for a while, and make it alive again for nobody.
    world.queue.run_until(world.now + 4.0)
    assert {process.machine.dead(lost) for process in world.processes.values()} == {True}
    assert all(list(process.said) == [lost] for process in world.processes.values())


def test_neighbours_are_those_beside_and_across_whoever_comes_and_goes():
    ring, there = Ring(5), {5}
    rng = random.Random(1)
    for _ in range(300):
        rank, comes = rng.choice([rank for rank in range(40) if rank != 5]), rng.random() < 0.6
        ring.set_present(rank, comes)
        there = there | {rank} if comes else there - {rank}
        ranks, across = sorted(there), max(2, round(len(there) ** 0.5))
        at = ranks.index(5)
        near = {ranks[(at + offset) % len(ranks)] for offset in (-across, -1, 1, across)}
        assert ring.neighbours() == sorted(near - {5})


@pytest.mark.timeout(300)
def test_a_newcomer_in_a_large_run_learns_who_has_been_dead_for_long():
    world = World(3, 70, LinkQuality(min_delay_s=0.001, max_delay_s=0.001))
    for rank in range(70):
        world.start(rank)
    world.queue.run_until(2.0)
    # As on a machine that is off: nothing refuses.
    world.stop(42)
    world.queue.run_until(world.now + 6.0)
    world.crash(7)
    world.start(7)
    world.queue.run_until(world.now + 4.0)
    machine = world.processes[7].machine
    assert [rank for rank in range(70) if machine.dead(rank)] == [42]
    assert all(
        process.machine.dead(42) and not process.machine.dead(7)
        for process in world.processes.values()
        if not process.stopped
    )


OWN = Record(1, 5, 9, 2, Stage.DONE, 123, 4.5, (1, 2, 3), (0, 7, 1), ("127.0.0.1", 4711))


def test_messages_travel_as_they_are():
    other = OWN._replace(rank=0, address=("fe80::1%eth0", 1), unreachable=(1, 2))
    data = to_bytes(Kind.PING, [other, OWN], [(0, 7)])
    assert from_bytes(data, 3) == Message(Kind.PING, (other, OWN), ((0, 7),))


PROPOSAL = ViewMessage(ViewKind.PROPOSE, 2, 5, 9, ViewId(9, 0, 5), (Member(0, 5), Member(2, 8)))


def test_messages_about_views_travel_as_they_are():
    for message in (PROPOSAL, PROPOSAL._replace(kind=ViewKind.PRESENT, members=())):
        assert messages.from_bytes(messages.to_bytes(message), 3) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 200,
        messages.to_bytes(PROPOSAL)[:-1],
        messages.to_bytes(PROPOSAL) + b"x",
        messages.to_bytes(PROPOSAL._replace(kind=3)),
        messages.to_bytes(PROPOSAL._replace(purpose=3)),
        messages.to_bytes(PROPOSAL._replace(id=ViewId(9, 3, 5))),
        messages.to_bytes(PROPOSAL._replace(members=(Member(3, 5),))),
        messages.to_bytes(PROPOSAL._replace(members=(Member(1, 5), Member(0, 8)))),
        messages.to_bytes(PROPOSAL._replace(members=(Member(1, 5), Member(1, 8)))),
    ],
)
def test_what_is_no_message_about_a_view_is_refused(data):
    assert messages.from_bytes(data, 3) is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [80, 256])
def test_many_workers_agree_within_a_second_of_a_loss_and_send_little(workers):
    crowd = run_crowd(workers)
    assert crowd.num_views == 1
    assert crowd.agreed_s < 1.0
    # Four neighbours, five times a second, and not all records to all of them: as much in a run of any size.
    assert crowd.messages_per_worker < 30
    assert crowd.bytes_per_worker < 150_000
    assert crowd.most_bytes < 8_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xff" * 200,
        to_bytes(Kind.GOSSIP, []),
        to_bytes(Kind.GOSSIP, [OWN])[:-1],
        to_bytes(Kind.GOSSIP, [OWN]) + b"x",
        to_bytes(Kind.GOSSIP, [OWN._replace(rank=2)]),
        to_bytes(Kind.GOSSIP, [OWN._replace(busy_s=float("nan"))]),
        to_bytes(Kind.GOSSIP, [OWN._replace(address=("a b", 1))]),
        to_bytes(Kind.GOSSIP, [OWN._replace(address=("a", 0))]),
        to_bytes(7, [OWN]),
        to_bytes(Kind.GOSSIP, [OWN._replace(unreachable=(0, 2))]),
        to_bytes(Kind.GOSSIP, [OWN._replace(unreachable=(0, 0))]),
        to_bytes(Kind.GOSSIP, [OWN._replace(unreachable=(0,))])[:-1],
        to_bytes(Kind.GOSSIP, [OWN._replace(stage=9)]),
        to_bytes(Kind.GOSSIP, [OWN], [(2, 7)]),
    ],
)
def test_what_is_no_message_is_refused(data):
    assert from_bytes(data, 2) is None


def test_a_worker_that_has_only_published_its_address_can_be_dead():
    machine = Liveness(first_record(0, 1, ("a", 1)), 3, 0.0)
    machine.found(1, 7, ("b", 1), 0.0)
    machine.refused(1, ("b", 1), 0.1)
    machine.tick(0.6)
    assert machine.dead(1)
    # What another worker has heard of it may be older than its death.
    two, one = first_record(2, 1, ("c", 1)), first_record(1, 7, ("b", 1))._replace(heartbeats=50)
    machine.receive(2, Message(Kind.GOSSIP, (two, one)), 0.7)
    assert machine.dead(1)
    machine.found(1, 8, ("b", 2), 0.8)
    assert not machine.dead(1)


def test_two_processes_of_a_rank_that_took_the_same_number_are_told_apart():
    """The first one raised its number and died; the second one heard of the lower number, and raised its own too."""
    first = first_record(1, 5, ("b", 1))._replace(heartbeats=50, changes=2)
    second = Liveness(first_record(1, 5, ("b", 2)), 3, 0.0)
    other = Liveness(first_record(0, 1, ("a", 1)), 3, 0.0)
    other.receive(1, Message(Kind.GOSSIP, (first,)), 0.0)
    assert other.record(1) == first
    other.receive(1, Message(Kind.GOSSIP, (second.own,)), 0.1)
    for send in other.actions:
        second.receive(0, send.message, 0.2)
    assert second.own.process == 6
    other.receive(1, Message(Kind.GOSSIP, (second.own,)), 0.3)
    assert other.record(1) == second.own


def test_a_process_whose_number_was_read_before_its_address_keeps_its_number():
    worker = Liveness(first_record(1, 5, ("b", 2)), 3, 0.0)
    other = Liveness(first_record(0, 1, ("a", 1)), 3, 0.0)
    other.found(1, 5, ("b", 1), 0.0)
    worker.receive(0, Message(Kind.GOSSIP, (other.own, first_record(1, 5, ("b", 1)))), 0.1)
    assert worker.own.process == 5
    worker.beat(1, 0.1)
    other.receive(1, Message(Kind.GOSSIP, (worker.own,)), 0.2)
    assert other.record(1) == worker.own


def test_what_was_under_way_when_a_worker_died_does_not_revive_it():
    machine = Liveness(first_record(0, 1, ("a", 1)), 3, 0.0)
    two = first_record(2, 1, ("c", 1))._replace(heartbeats=50)
    one = first_record(1, 1, ("b", 1))
    machine.receive(2, Message(Kind.GOSSIP, (two,)), 0.0)
    machine.refused(2, ("c", 1), 0.1)
    assert not machine.dead(2)
    machine.tick(0.6)
    assert machine.dead(2)
    late = two._replace(heartbeats=52)
    machine.receive(1, Message(Kind.GOSSIP, (one, late)), 0.7)
    assert machine.dead(2)
    alive = two._replace(heartbeats=60)
    machine.receive(1, Message(Kind.GOSSIP, (one._replace(heartbeats=1), alive)), 0.8)
    assert not machine.dead(2)
