"""What each effect answers in the virtual cluster, how many bytes it sends, and how long it takes."""

import itertools
import math

import pytest
import torch
from adhoc_methods import filled, make_cluster, make_method, run_step

from gossamer.config import resolve
from gossamer.effects import Gather, Mean, Pair, Start, Swap, Update, Wait, WaitSteps
from gossamer.vectors.vector_math import combine
from gossamer.virtual.sim.cluster import Cluster


@pytest.fixture
def seen():
    return {}


def test_the_mean_is_weighted_and_scalars_travel_along(seen):
    def step(self, worker):
        rank = worker.rank
        mean, scalars = yield Mean(filled(worker, rank), round=0, weight=rank, scalars=(10.0 * rank, 1.0))
        seen[rank] = mean.tolist(), scalars
        yield Update()

    cluster = run_step((Mean,), step)
    # Weights 0, 1, 2: (0·0 + 1·1 + 2·2) / 3.
    expected = 5 / 3
    for mean, scalars in seen.values():
        assert mean == pytest.approx([expected] * 3)
        assert scalars == pytest.approx((10 * expected, 1.0))
    # A ring of three: 4/3 of three floats and two scalars of eight bytes.
    assert [worker.bytes_sent for worker in cluster.workers] == [round(4 / 3 * (12 + 16))] * 3


@pytest.mark.parametrize("own", [False, True])
def test_the_weighted_mean_of_rows_ignores_what_has_no_weight(own, seen):
    """Rows on the tape and tensors of the method's own give the same, also if a vector without weight is not finite."""

    def step(self, worker):
        vector = worker.vector("sent")
        vector.add_(filled(worker, worker.rank + 1))
        if worker.rank == 2:
            vector.mul_(math.nan)
        sent = vector + 0.0 if own else vector
        mean = yield Mean(sent, round=0, weight=(0.25, 0.75, 0.0)[worker.rank])
        worker.x.copy_(mean)
        yield Mean(worker.x, round=0, topic="none", weight=0.0)
        seen[worker.rank] = (worker.x + 0.0).tolist()

    run_step((Mean,), step, task="consensus")
    assert seen == {rank: [1.75] * 3 for rank in range(3)}


def test_a_mean_without_any_weight_is_zero(seen):
    def step(self, worker):
        mean, scalars = yield Mean(worker.x, round=0, weight=0.0, scalars=(3.0,))
        seen[worker.rank] = mean.tolist(), scalars

    run_step((Mean,), step, task="consensus")
    assert seen == {rank: ([0.0] * 3, (0.0,)) for rank in range(3)}


def test_gathers_of_groups_stay_apart_and_are_copies(seen):
    def step(self, worker):
        group = (0, 1, 3) if worker.rank != 2 else (2,)
        worker.vector("sent").add_(filled(worker, worker.rank))
        tensors = (worker.vector("sent"), torch.tensor([worker.rank]))
        gathered = yield Gather(tensors, round=0, group=group)
        # Everybody has its answer: from now on what was sent may change.
        worker.vector("sent").zero_()
        yield Gather((torch.zeros(1),), round=1)
        seen[worker.rank] = [[tensor.tolist() for tensor in each] for each in gathered]

    cluster = run_step((Gather,), step, workers=4)
    assert seen[2] == [[[2.0] * 3, [2]]]
    assert seen[0] == seen[1] == seen[3] == [[[float(rank)] * 3, [rank]] for rank in (0, 1, 3)]
    # Two messages of 12 + 8 bytes in the group of three, then three of 4 bytes everywhere.
    assert [worker.bytes_sent for worker in cluster.workers] == [52, 52, 12, 52]


def test_concurrent_averagings_are_kept_apart_by_their_topic(seen):
    def step(self, worker):
        topics = ["one", "ten"] if worker.rank % 2 else ["ten", "one"]
        tickets = {}
        for topic in topics:
            vector = filled(worker, worker.rank * (1 if topic == "one" else 10))
            tickets[topic] = yield Start(Mean(vector, round=0, topic=topic))
        for topic in topics:
            seen[worker.rank, topic] = (yield Wait(tickets[topic])).tolist()

    run_step((Mean, Start, Wait), step)
    assert seen == {(rank, topic): [value] * 3 for rank in range(3) for topic, value in (("one", 1.0), ("ten", 10.0))}


def swapping(seen, started=False, size=3):
    def background(self, worker):
        yield WaitSteps(worker.rank + 1)
        peer = yield Pair(math.inf)
        swap = Swap(filled(worker, worker.rank, size), peer, scalars=(0.5 + worker.rank,))
        if started:
            worker.tickets["swap"] = yield Start(swap)
            seen[worker.rank, "started"] = worker.time
            yield WaitSteps(1)
            received, scalars = yield Wait(worker.tickets.pop("swap"))
        else:
            received, scalars = yield swap
        seen[worker.rank] = peer, received.tolist(), scalars, worker.time

    return make_method((Pair, Swap, WaitSteps, Start, Wait), background=background)


@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_a_swap_carries_scalars_and_pairs_at_once_at_an_infinite_rate(clock, seen):
    cluster = make_cluster(swapping(seen), workers=2, clock=clock)
    cluster.run_until(20.0)
    for rank in range(2):
        assert seen[rank][:3] == (1 - rank, [1.0 - rank] * 3, (1.5 - rank,))
        assert cluster.workers[rank].bytes_sent == 12 + 8
    assert seen[0][3] == seen[1][3]
    if clock == "hardware":
        assert seen[0][3] == 2.0, "worker 1 is ready after two steps of a second"


def test_a_swap_may_be_started_and_waited_for_later(seen):
    # 20 bytes at 80 bytes/s take a quarter of a second.
    cluster = make_cluster(swapping(seen, started=True), workers=2, link="80b/0ms")
    cluster.run_until(10.0)
    for rank in range(2):
        assert seen[rank, "started"] == 2.0
        assert seen[rank] == (1 - rank, [1.0 - rank] * 3, (1.5 - rank,), 3.0)
    assert cluster.exchanges.count == 1


@pytest.mark.parametrize("started", [False, True])
def test_a_swap_with_a_peer_that_dies_is_void(started, seen):
    def background(self, worker):
        peer = yield Pair(math.inf)
        swap = Swap(worker.snapshot(), peer, scalars=(1.0,))
        if started:
            worker.tickets["swap"] = yield Start(swap)
            seen[worker.rank] = yield Wait(worker.tickets.pop("swap"))
        else:
            seen[worker.rank] = yield swap
        yield WaitSteps(100)

    method = make_method((Pair, Swap, Start, Wait, WaitSteps), background=background)
    make_cluster(method, workers=2, link="1b/0ms", fail="1@0.5").run_until(3.0)
    assert seen == {0: None}


def test_what_arrives_may_be_written_to_and_kept(seen):
    """By the receiver and by the sender, at any time, without any effect on the other."""

    def background(self, worker):
        peer = yield Pair(1.0)
        sent = worker.snapshot()
        received = yield Swap(sent, peer)
        sent.sub_(received)
        if worker.rank:
            received.mul_(0.0).add_(sent, alpha=2.0)
        yield WaitSteps(2)
        seen[worker.rank] = (sent + 0.0).tolist(), (received + 0.0).tolist()

    cluster = make_cluster(make_method((Pair, Swap, WaitSteps), background=background), workers=2, task="consensus")
    zero, one = (row.clone() for row in cluster.replicas.rows())
    cluster.run_until(30.0)
    assert seen[0] == ((zero - one).tolist(), one.tolist())
    assert seen[1] == ((one - zero).tolist(), pytest.approx((2 * (one - zero)).tolist()))


def test_a_part_of_a_vector_that_is_swapped_is_that_of_the_moment_it_was_sent(seen):
    def background(self, worker):
        peer = yield Pair(math.inf)
        vector = worker.vector("sent")
        vector.add_(filled(worker, worker.rank + 1))
        received = yield Swap(vector[1:], peer)
        vector.mul_(100.0)
        yield WaitSteps(2)
        seen[worker.rank] = received.tolist()

    make_cluster(make_method((Pair, Swap, WaitSteps), background=background), workers=2).run_until(5.0)
    assert seen == {0: [2.0] * 2, 1: [1.0] * 2}


def test_begin_runs_with_the_initial_weights_and_with_the_state_that_was_taken_over(seen):
    def begin(self, worker):
        anchor = worker.vector("anchor")
        seen.setdefault(worker.rank, []).append(
            (worker.step, (anchor + 0.0).tolist(), worker.vector("common").tolist(), dict(worker.scalars))
        )
        anchor.copy_(worker.x)
        combine((worker.vector("common"), 1.0, ((2.0, worker.x),)))
        worker.scalars.update(common=1.0, own=1.0)

    method = make_method((), begin=begin)
    method.shared = ("common",)
    cluster = make_cluster(method, workers=2, task="consensus", fail="1@2.5", join="1@4.5")
    x, peer = cluster.workers[1].x.tolist(), cluster.workers[0].x.tolist()
    assert seen[1] == [(0, [0.0] * 3, [0.0] * 3, {})]
    assert cluster.workers[1].vector("anchor").tolist() == x
    cluster.run_until(5.0)
    common = pytest.approx([2.0 * value for value in peer])
    assert seen[1][1:] == [(4, [0.0] * 3, common, {"common": 1.0})]
    assert cluster.workers[1].vector("anchor").tolist() == peer
    assert len(seen[0]) == 1


def test_offsets_are_where_the_parameters_begin():
    (run,) = resolve({"task": "digits", "workers": 2}, method=make_method(()))
    cluster = Cluster(run)
    sizes = [parameter.numel() for parameter in cluster.evaluator.model.parameters()]
    offsets = cluster.workers[0].offsets
    assert [after - before for before, after in itertools.pairwise(offsets)] == sizes
    assert offsets[0] == 0
    assert offsets[-1] == len(cluster.workers[0].x)
