"""Workers that wait for each other for ever get one line that names two of them and where each is."""

import re

import pytest
from adhoc_methods import make_cluster, make_method, run_step

from gossamer import cli
from gossamer.config import resolve
from gossamer.effects import Mean, Start, Update, Wait, WaitSteps, yields
from gossamer.errors import MethodError
from gossamer.methods import METHODS
from gossamer.virtual.comm.deadlocks import DeadlockDetector
from gossamer.virtual.simulation import simulate
from plain_training import cluster_of

SAME_ORDER = ": all members must yield the same collectives in the same order"


def refused(message):
    return pytest.raises(MethodError, match="^" + re.escape(message))


CLOCKS = pytest.mark.parametrize("clock", ["ideal", "hardware"])


@CLOCKS
def test_different_topics_are_refused(clock):
    def step(self, worker):
        yield Mean(worker.x, round=worker.step, topic=f"of {worker.rank % 2}")

    with refused(
        f"method mine: worker 0 waits in Mean 'of 0' round 0, worker 1 waits in Mean 'of 1' round 0{SAME_ORDER}"
    ):
        run_step((Mean,), step, clock=clock)


@CLOCKS
def test_different_rounds_are_refused(clock):
    def step(self, worker):
        yield Mean(worker.x, round=worker.rank, topic="same")

    with refused(f"method mine: worker 0 waits in Mean 'same' round 0, worker 1 is in round 1{SAME_ORDER}"):
        run_step((Mean,), step, clock=clock)


@CLOCKS
def test_different_groups_are_refused(clock):
    def step(self, worker):
        group = (0, 1) if worker.rank == 0 else (0, 1, 2)
        yield Mean(worker.x, round=0, topic="same", group=group)

    with refused(
        "method mine: worker 0 waits in Mean 'same' round 0 of workers 0, 1, worker 1 is in Mean 'same' round 0 of "
        f"workers 0, 1, 2{SAME_ORDER}"
    ):
        run_step((Mean,), step, clock=clock)


@CLOCKS
def test_three_workers_that_wait_in_a_circle_are_refused(clock):
    def step(self, worker):
        for group in {0: ((0, 1), (0, 2)), 1: ((1, 2), (0, 1)), 2: ((0, 2), (1, 2))}[worker.rank]:
            yield Mean(worker.x, round=0, topic=str(group), group=group)

    with refused(
        "method mine: worker 0 waits in Mean '(0, 1)' round 0 of workers 0, 1, worker 1 waits in Mean '(1, 2)' round 0"
    ):
        run_step((Mean,), step, clock=clock)


@CLOCKS
def test_two_workers_that_wait_while_others_go_on_are_refused(clock):
    def step(self, worker):
        yield Update()
        group = (0, 1) if worker.rank < 2 else (2, 3)
        topic = f"topic {worker.rank}" if worker.rank < 2 else "both"
        yield Mean(worker.x, round=worker.step, topic=topic, group=group)

    with refused(
        "method mine: worker 0 waits in Mean 'topic 0' round 0 of workers 0, 1, worker 1 waits in Mean 'topic 1'"
    ):
        run_step((Mean,), step, until=60.0, workers=4, clock=clock)


@CLOCKS
def test_a_worker_that_goes_on_with_another_group_is_refused(clock):
    def step(self, worker):
        yield Update()
        if worker.rank == 0:
            yield Mean(worker.x, round=0, group=(0, 1))
        else:
            yield Mean(worker.x, round=worker.step, group=(1, 2))

    with refused("method mine: worker 0 waits in Mean 'mean' round 0 of workers 0, 1, worker 1 is in Mean 'mean'"):
        run_step((Mean,), step, until=60.0, clock=clock)


@CLOCKS
def test_waiting_for_different_averagings_that_were_started_is_refused(clock):
    def step(self, worker):
        ticket = yield Start(Mean(worker.x, round=worker.step, topic=("a", "b")[worker.rank]))
        yield Wait(ticket)

    with refused("method mine: worker 0 waits in Mean 'a' round 0, worker 1 waits in Mean 'b' round 0"):
        run_step((Mean, Start, Wait), step, workers=2, clock=clock)


@CLOCKS
def test_a_background_that_ends_while_others_wait_for_it_is_refused(clock):
    def background(self, worker):
        for round in range(2 if worker.rank else 5):
            yield WaitSteps(1)
            yield Mean(worker.x, round=round)

    with refused(f"method mine: worker 0 waits in Mean 'mean' round 2, worker 1 has ended its background{SAME_ORDER}"):
        make_cluster(make_method((Mean, WaitSteps), background=background), clock=clock).run_until(60.0)


@CLOCKS
def test_a_step_and_a_background_that_wait_for_each_other_are_refused(clock):
    """Worker 0's step waits for worker 1's background, which waits for its step, which waits for worker 0's step."""

    def step(self, worker):
        if worker.rank == 0:
            yield Wait(worker.tickets["b"])
        yield Mean(worker.x, round=worker.step, topic="a")

    def background(self, worker):
        if worker.rank:
            yield WaitSteps(1)
        worker.tickets["b"] = yield Start(Mean(worker.x, round=0, topic="b"))

    method = make_method((Mean, WaitSteps, Start), background=background)
    method.step = yields(Mean, Wait)(step)
    with refused("method mine: worker 0 waits in Mean 'b' round 0, worker 1 waits for steps that it cannot do"):
        make_cluster(method, workers=2, clock=clock).run_until(20.0)


@CLOCKS
def test_waits_that_end_are_no_deadlock(clock):
    """Slow workers, groups, started averagings in any order, and steps and background parts that wait at a time."""

    def step(self, worker):
        yield Update()
        group = worker.topology.group(worker.step, worker.rank).members
        order = ["a", "b"] if worker.rank % 2 else ["b", "a"]
        tickets = {}
        for topic in order:
            tickets[topic] = yield Start(Mean(worker.x, round=worker.step, topic=topic))
        yield Mean(worker.x, round=worker.step, topic="model", group=group)
        for topic in reversed(order):
            yield Wait(tickets[topic])

    def background(self, worker):
        for round in range(1000):
            yield WaitSteps(1 + worker.rank)
            yield Mean(worker.x, round=round, topic="background")

    method = make_method((Mean, WaitSteps), background=background)
    method.step = yields(Mean, Start, Wait, Update)(step)
    values = {"workers": 6, "topology": "ring", "compute": "exponential:1s", "straggler": "1:4", "link": "50b/100ms"}
    cluster = make_cluster(method, clock=clock, fail="2@30.5", join="2@60.5", **values)
    cluster.run_until(200.0)
    assert min(worker.step for worker in cluster.workers) > 10
    assert cluster.exchanges.count > 100


def test_a_finish_that_differs_is_refused():
    def finish(self, worker):
        yield Mean(worker.x, round=worker.rank, topic="last", group=None)

    cluster = make_cluster(make_method((Mean,), finish=finish), workers=2)
    with refused(f"method mine: worker 0 waits in Mean 'last' round 0, worker 1 is in round 1{SAME_ORDER}"):
        cluster.finish()

    def topics(self, worker):
        if worker.rank:
            yield Mean(worker.x, round=0, topic="last")

    cluster = make_cluster(make_method((Mean,), finish=topics), workers=2)
    with refused(f"method mine: worker 1 waits in Mean 'last' round 0, worker 0 has ended its finish{SAME_ORDER}"):
        cluster.finish()


# What users see


class OtherTopics(make_method(())):
    """For the command line, which finds methods in the table."""


def different_topics(self, worker):
    yield Mean(worker.x, round=worker.step, topic=f"of {worker.rank}")


different_topics.yields = frozenset({Mean})
OtherTopics.step = different_topics


@CLOCKS
def test_the_error_comes_out_of_simulate(clock):
    (run,) = resolve({"task": "quadratic", "dim": 3, "workers": 3, "clock": clock, "steps": 20}, method=OtherTopics)
    with refused("method mine: worker 0 waits in Mean 'of 0' round 0, worker 1 waits in Mean 'of 1' round 0"):
        simulate(run)


def test_the_command_line_prints_one_line_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setitem(METHODS, "mine", OtherTopics)
    assert cli.main(["simulate", "--task", "quadratic", "--workers", "2", "--method", "mine"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert error.startswith("gossamer: method mine: worker 0 waits in Mean 'of 0' round 0")


def test_starting_many_workers_counts_them_once(monkeypatch):
    counted = []

    def count(self):
        counted.append(len(self.workers))
        self.num_alive = sum(worker.alive for worker in self.workers)

    monkeypatch.setattr(DeadlockDetector, "on_membership_change", count)
    cluster = cluster_of(task="quadratic", workers=50, steps=1, join="7@0.2")
    assert counted == [50]
    assert cluster.driver.deadlocks.num_alive == 49
    while cluster.advance() and cluster.queue.now < 0.5:
        pass
    assert counted == [50, 50]
    assert cluster.driver.deadlocks.num_alive == 50
