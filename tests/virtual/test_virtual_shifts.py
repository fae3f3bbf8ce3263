"""Shifts: what arrives, what does not where workers are gone, how long it takes."""

import pytest
import torch
from adhoc_methods import filled, make_cluster, make_method, run_step

from gossamer.config import resolve
from gossamer.effects import Shift, Start, Update, Wait
from gossamer.errors import MethodError
from gossamer.recording import Recorder
from gossamer.virtual.sim.cluster import Cluster


@pytest.fixture
def seen():
    return {}


def shifting(seen, hop=1, started=False, size=3):
    """Each worker sends its rank and step to the next one; what it gets is noted with the time."""

    def step(self, worker):
        n, rank = worker.num_workers, worker.rank
        sent = filled(worker, 10 * worker.step + rank, size)
        shift = Shift(sent, (rank + hop) % n, (rank - hop) % n, round=worker.step, scalars=(0.5 + rank,))
        yield Update()
        shifted = (yield Wait((yield Start(shift)))) if started else (yield shift)
        vector = None if shifted.vector is None else shifted.vector[:1].tolist()
        seen[worker.step, rank] = vector, shifted.scalars, shifted.delivered
        seen[worker.step, rank, "time"] = worker.time

    return make_method((Shift, Start, Wait), step=step)


@pytest.mark.parametrize("clock", ["ideal", "hardware"])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("hop", [1, 2])
def test_every_worker_receives_from_its_source(clock, started, hop, seen):
    cluster = make_cluster(shifting(seen, hop, started), workers=4, clock=clock)
    cluster.run_until(3.5)
    for step in range(3):
        for rank in range(4):
            source = (rank - hop) % 4
            assert seen[step, rank] == ([10.0 * step + source], (0.5 + source,), True)
    # The vector and the scalar, once per step.
    assert [worker.bytes_sent for worker in cluster.workers] == [3 * (12 + 8)] * 4
    assert [worker.exchanges for worker in cluster.workers] == [3] * 4
    assert cluster.exchanges.count == 3


def test_a_worker_may_send_to_itself(seen):
    def step(self, worker):
        to = worker.rank if worker.rank == 2 else 1 - worker.rank
        shifted = yield Shift(filled(worker, worker.rank), to, to, round=0)
        seen[worker.rank] = shifted.vector.tolist(), shifted.delivered

    cluster = run_step((Shift,), step)
    assert seen == {0: ([1.0] * 3, True), 1: ([0.0] * 3, True), 2: ([2.0] * 3, True)}
    assert [worker.bytes_sent for worker in cluster.workers] == [12, 12, 0]


def test_one_worker_alone_receives_its_own(seen):
    cluster = make_cluster(shifting(seen), workers=1)
    cluster.run_until(1.5)
    assert seen[0, 0] == ([0.0], (0.5,), True)
    assert cluster.exchanges.count == cluster.workers[0].bytes_sent == 0


def test_messages_travel_at_once_and_a_worker_waits_only_for_its_two_peers(seen):
    # 12 + 8 bytes at 80 bytes/s: a quarter of a second, plus a latency of 50 ms. Worker 2 computes for 3 s.
    cluster = make_cluster(shifting(seen), workers=5, link="80b/50ms", straggler="2:3")
    cluster.run_until(4.0)
    ended = [seen[0, rank, "time"] * cluster.workers[rank].mean_gradient_time for rank in range(5)]
    assert ended == pytest.approx([1.3, 3.3, 3.3, 3.3, 1.3])


def test_a_message_shares_only_its_own_direction_of_a_card(seen):
    """Four workers on two nodes: each node's card carries two messages out and two in."""
    method = shifting(seen, hop=2)
    make_cluster(method, workers=4, nodes=2, link="80b/0ms").run_until(3.0)
    assert {seen[0, rank, "time"] for rank in range(4)} == {1.5}


@pytest.mark.parametrize("started", [False, True])
def test_what_a_dead_worker_would_have_sent_is_missing(started, seen):
    cluster = make_cluster(shifting(seen, started=started), workers=4, fail="1@1.5")
    cluster.run_until(2.5)
    assert seen[0, 0] == ([3.0], (3.5,), True)
    assert seen[1, 0] == ([13.0], (3.5,), False), "its receiver is gone"
    assert seen[1, 2] == (None, (), True), "its source is gone"
    assert seen[1, 3] == ([12.0], (2.5,), True)
    # Nothing was sent to the dead worker.
    assert [worker.bytes_sent for worker in cluster.workers] == [20, 20, 40, 40]


def test_workers_that_wait_for_one_that_dies_go_on(seen):
    """Worker 1 computes for 4 s and dies after 2.5 s; its neighbours have waited since 1 s."""
    cluster = make_cluster(shifting(seen), workers=4, straggler="1:4", fail="1@2.5")
    cluster.run_until(2.6)
    assert seen[0, 0] == ([3.0], (3.5,), False)
    assert seen[0, 2] == (None, (), True)
    assert seen[0, 0, "time"] == seen[0, 2, "time"] == 2.5
    cluster.run_until(6.0)
    assert seen[1, 0][2] is seen[2, 0][2] is False


def test_a_message_in_flight_is_lost_with_its_sender_and_returned_by_a_dead_receiver(seen):
    # Messages take 2 s; worker 1 dies 1 s after it sent.
    make_cluster(shifting(seen), workers=3, link="10b/0ms", fail="1@2").run_until(3.1)
    assert seen[0, 0] == ([2.0], (2.5,), False)
    assert seen[0, 2] == (None, (), True)


def test_a_worker_that_joins_takes_part_from_its_peers_next_round_on(seen):
    cluster = make_cluster(shifting(seen), workers=3, fail="1@1.5", join="1@3.5")
    # Worker 1 joins half-way through a gradient of the others, and they wait for its own.
    cluster.run_until(7.0)
    assert [seen[step, 0][2] for step in range(6)] == [True, False, False, True, True, True]
    assert seen[4, 2] == ([41.0], (1.5,), True)
    assert [worker.steps_done for worker in cluster.workers] == [6, 4, 6]


def test_what_is_received_is_a_copy(seen):
    def step(self, worker):
        sent = worker.vector("sent")
        sent.add_(filled(worker, worker.rank + 1))
        shifted = yield Shift(sent, 1 - worker.rank, 1 - worker.rank, round=worker.step)
        sent.mul_(-1.0)
        worker.vector("kept").copy_(shifted.vector)
        shifted.vector.mul_(7.0)
        yield Update()
        seen[worker.rank] = (worker.vector("kept") + 0.0).tolist(), (sent + 0.0).tolist()

    run_step((Shift,), step, workers=2)
    assert seen == {0: ([2.0] * 3, [-1.0] * 3), 1: ([1.0] * 3, [-2.0] * 3)}


def test_a_message_that_is_not_waited_for_at_the_end_is_applied_in_finish(seen):
    def step(self, worker):
        n, rank = worker.num_workers, worker.rank
        yield Update()
        if worker.step == 2:
            worker.tickets["push"] = yield Start(Shift(worker.x, (rank + 1) % n, (rank - 1) % n, round=0))

    def finish(self, worker):
        if "push" in worker.tickets:
            shifted = yield Wait(worker.tickets.pop("push"))
            seen[worker.rank] = shifted.vector is not None, shifted.delivered

    method = make_method((Shift, Start, Wait), step=step)
    method.finish = finish
    finish.yields = frozenset({Wait})
    # Worker 2 has not sent yet: what it would get is not sent, and nobody waits for it.
    cluster = make_cluster(method, workers=3, straggler="2:2")
    cluster.run_until(3.5)
    cluster.finish()
    assert seen == {0: (False, True), 1: (True, False)}
    assert cluster.exchanges.count == 1


def test_the_recording_has_the_bytes_of_all_messages(seen):
    (run,) = resolve({"task": "quadratic", "dim": 4, "workers": 3, "steps": 10, "link": "inf"}, method=shifting(seen))
    recorder = Recorder(range(3))
    cluster = Cluster(run, recorder)
    while cluster.total_steps < 30:
        cluster.advance()
    edges = recorder.document()["edges"]
    assert sum(edge[2] for edge in edges) == sum(worker.bytes_sent for worker in cluster.workers) > 0
    assert [edge[:2] for edge in edges] == [[0, 1], [0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (
            {0: (1, 2), 1: (0, 0), 2: (0, 1)},
            "method mine: in Shift 'shift' round 0 worker 1 sends to worker 0, worker 0 receives from worker 2",
        ),
        ({0: (3, 1)}, "method mine: worker 0 names worker 3 in Shift 'shift' round 0: expected a rank from 0 to 2"),
        ({0: (1, 2), 1: (2, 0), 2: (1, 1)}, "worker 2 sends to worker 1, worker 1 receives from worker 0: source must"),
        ({0: (0, 1), 1: (1, 1), 2: (2, 2)}, "source must be the inverse of to"),
    ],
)
def test_routes_that_do_not_fit_are_refused(route, message):
    def step(self, worker):
        to, source = route.get(worker.rank, (worker.rank, worker.rank))
        yield Shift(worker.x, to, source, round=0)

    with pytest.raises(MethodError) as error:
        run_step((Shift,), step)
    assert message in str(error.value)


def test_vectors_of_different_lengths_are_refused():
    def step(self, worker):
        n, rank = worker.num_workers, worker.rank
        yield Shift(torch.zeros(3 + rank), (rank + 1) % n, (rank - 1) % n, round=0)

    with pytest.raises(
        MethodError, match="worker 0 sends 3 float32 in Shift 'shift' round 0, worker 1 sends 4 float32"
    ):
        run_step((Shift,), step)
