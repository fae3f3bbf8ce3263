"""The closed forms against the virtual cluster: the same thing computed twice."""

import dataclasses
import math

import numpy as np
import pytest

from gossamer.effects import Mean, Update
from gossamer.hardware import Link
from gossamer.methods import METHODS, Method
from gossamer.plan import disagreement, replay
from gossamer.plan.closed_form import FORMS, Scene
from gossamer.plan.comm_times import Times
from gossamer.plan.machines import ComputeProfile, Costs, Machines, Shape, Table, shapes
from gossamer.plan.predict import BANDWIDTH, COMPUTE, LATENCY, SLOWEST, Candidate, candidates, predict
from gossamer.topology import build

TOPOLOGIES = ("ring", "complete", "one-peer-exponential", "alternating-exponential-ring")


def cluster(nodes=4, per_node=2, gbit=5.0, **compute):
    return Machines(
        nodes=nodes,
        per_node=per_node,
        compute=ComputeProfile(**{"mean_s": 0.06, **compute}),
        inside=Link(12.5e9, 1e-5),
        between=Link(gbit * 1e9 / 8, 5e-5),
    )


ALL = [each for each in candidates(8, 4, topologies=TOPOLOGIES) if each.options.get("rate", 1.0) == 1.0]


def test_every_method_has_a_form():
    assert set(FORMS) == set(METHODS)


@pytest.mark.parametrize("parameters", [1_000_000, 50_000_000])
@pytest.mark.parametrize("candidate", ALL, ids=lambda each: f"{each.label} {each.topology}")
def test_constant_compute_is_the_virtual_cluster_to_a_thousandth(candidate, parameters):
    scene = Scene(cluster(), parameters, num_runs=1)
    by_form = predict(scene, candidate)
    by_running = replay.forecast(scene, candidate.method, candidate.topology, candidate.options)
    assert by_form.step_s == pytest.approx(float(by_running.step_s[0]), rel=1e-3)
    if METHODS[candidate.method].lockstep:
        assert by_form.bytes_per_step == pytest.approx(by_running.bytes_per_step, rel=1e-3)


SYNCHRONOUS = [
    Candidate("allreduce", "complete", {}),
    Candidate("localsgd", "complete", {"period": 8}),
    Candidate("divisible", "complete", {"period": 8, "ratio": 128.0}),
    Candidate("overlap", "complete", {}),
    Candidate("overlap", "ring", {}),
    Candidate("gossip", "ring", {"rate": 1.0}),
    Candidate("lasgd", "complete", {"period": 1}),
]


@pytest.mark.parametrize("candidate", SYNCHRONOUS, ids=lambda each: f"{each.label} {each.topology}")
@pytest.mark.parametrize("compute", [{"factors": (1, 1, 3, 1)}, {"spread": 0.2}], ids=["straggler", "spread"])
def test_slow_and_uneven_workers_on_cards_of_their_own(candidate, compute):
    scene = Scene(cluster(4, 1, **compute), 10_000_000, num_runs=16)
    by_form = predict(scene, candidate)
    running = [
        replay.forecast(dataclasses.replace(scene, seed=seed), candidate.method, candidate.topology, candidate.options)
        for seed in range(4)
    ]
    measured = float(np.mean([each.step_s for each in running]))
    assert by_form.step_s == pytest.approx(measured, rel=0.02)


def test_cards_that_are_shared_are_shared_at_worst():
    # The forms let all groups of a round use a card at once; in the virtual cluster uneven workers pass each other by.
    scene = Scene(cluster(spread=0.2), 10_000_000)
    by_form = predict(scene, Candidate("overlap", "ring", {}))
    by_running = replay.forecast(scene, "overlap", "ring", {})
    assert 1.0 <= by_form.step_s / float(by_running.step_s[0]) < 1.15


@pytest.mark.parametrize("candidate", SYNCHRONOUS, ids=lambda each: f"{each.label} {each.topology}")
def test_measured_tables_are_what_the_virtual_cluster_runs_on(candidate):
    sizes = (4096, 1_000_000, 100_000_000)

    def table(kind, members, at_once=1):
        return Table(
            kind=kind, shape=Shape(members, members, at_once), sizes_bytes=sizes, seconds=(0.002, 0.01, 0.9 * members)
        )

    tables = (table("mean", 4), table("mean", 2), table("exchange", 2), table("gather", 4))
    scene = Scene(dataclasses.replace(cluster(4, 1), tables=tables), 10_000_000, num_runs=1)
    by_form = predict(scene, candidate)
    by_running = replay.forecast(scene, candidate.method, candidate.topology, candidate.options)
    # The virtual cluster takes two messages of one worker at once for the tables' two groups on one node.
    tolerance = 0.05 if candidate.method == "divisible" else 1e-3
    assert by_form.step_s == pytest.approx(float(by_running.step_s[0]), rel=tolerance)


def test_all_reduce_by_hand():
    # 8 workers on 4 nodes at 5 Gbit/s: 14/8 of 40 MB over 625 MB/s, 14 latencies, and the slowest of 8.
    scene = Scene(cluster(factors=(1, 1, 1, 1, 1, 1, 1, 2)), 10_000_000, num_runs=1)
    expected = 0.12 + 14 / 8 * 40e6 / 625e6 + 14 * 5e-5
    assert predict(scene, ALL[0]).workers == 8
    assert predict(scene, Candidate("allreduce", "complete", {})).step_s == pytest.approx(expected)


def test_overlapped_pairs_by_hand():
    # Two workers: compute hides what it can of 40 MB over 625 MB/s.
    scene = Scene(cluster(2, 1), 10_000_000, num_runs=1)
    assert predict(scene, Candidate("overlap", "ring", {})).step_s == pytest.approx(0.0641, rel=1e-3)
    slow = Scene(cluster(2, 1, gbit=0.5), 10_000_000, num_runs=1)
    assert predict(slow, Candidate("overlap", "ring", {})).step_s == pytest.approx(0.6401, rel=1e-3)


def test_slow_down_and_passes_are_paid():
    costs = Costs(slowdown=1.5, mixing_bytes_per_s=4e9, compressing_bytes_per_s=4e8, overhead_s=0.001)
    machines = dataclasses.replace(cluster(2, 1), costs=costs)
    scene = Scene(machines, 10_000_000, num_runs=1)
    # 64.1 ms of message in flight: compute of 60 ms takes 60 + 64.1·(1 − 1/1.5) = 81.4 ms; two passes of 10 ms, 1 ms.
    step = predict(scene, Candidate("overlap", "ring", {})).step_s
    assert step == pytest.approx(0.06 + 0.06405 / 3 + 0.021, rel=1e-3)
    # All-reduce does not compute while it sends.
    assert predict(scene, Candidate("allreduce", "complete", {})).step_s == pytest.approx(
        0.06 + 0.021 + 0.0641, rel=1e-3
    )


@pytest.mark.parametrize(
    ("machines", "parameters", "bound"),
    [
        (cluster(gbit=100), 10_000, COMPUTE),
        (cluster(gbit=100, factors=(1,) * 7 + (3,)), 10_000, SLOWEST),
        (cluster(gbit=1), 10_000_000, BANDWIDTH),
        (dataclasses.replace(cluster(), between=Link(1e9, 0.05)), 10_000, LATENCY),
    ],
)
def test_what_a_step_is_bound_by(machines, parameters, bound):
    assert predict(Scene(machines, parameters), Candidate("allreduce", "complete", {})).bound_by == bound


def test_who_does_not_wait_is_bound_by_compute():
    scene = Scene(cluster(gbit=0.1, factors=(1,) * 7 + (3,)), 10_000_000)
    found = predict(scene, Candidate("gossip", "ring", {"rate": 1.0}))
    assert found.bound_by == COMPUTE
    # Seven make a step in 60 ms, one in 180.
    assert found.step_s == pytest.approx(8 / (7 / 0.06 + 1 / 0.18))


def test_shapes_of_a_round():
    groups = build("alternating-exponential-ring", workers=16, nodes=4).rounds[0]
    found = shapes([group.members for group in groups], 4)
    assert sorted((shape.members, shape.nodes, shape.at_once) for shape in found) == [(4, 1, 1), (4, 1, 1), (8, 2, 1)]
    across = build("one-peer-exponential", workers=16).rounds[2]
    assert set(shapes([group.members for group in across], 4)) == {Shape(2, 2, 4)}


def test_what_was_not_measured_is_said():
    table = Table(kind="mean", shape=Shape(4, 4), sizes_bytes=(4096, 1_000_000), seconds=(0.001, 0.02))
    times = Times(dataclasses.replace(cluster(4, 1), tables=(table,)))
    times.mean(Shape(4, 4), 1_000_000)
    assert not times.notes
    times.mean(Shape(4, 4), 2_000_000)
    times.mean(Shape(64, 64), 1_000_000)
    times.gather(Shape(4, 4), 1_000)
    assert list(times.notes) == [
        "messages of 2 MB: measured up to 1 MB",
        "groups of 64: measured up to 4",
        "no gather was measured: its time follows from the links",
    ]


def test_a_larger_group_costs_what_the_formula_says_times_how_far_it_was_off():
    machines = cluster(4, 1)
    exact = Times(machines).mean(Shape(4, 4), 1_000_000)
    table = Table(
        kind="mean",
        shape=Shape(4, 4),
        sizes_bytes=(4096, 1_000_000),
        seconds=(exact.latency_s, exact.latency_s + 3 * exact.transfer_s),
    )
    more = Times(dataclasses.replace(machines, tables=(table,))).mean(Shape(16, 16), 1_000_000)
    assert more.transfer_s == pytest.approx(3 * Times(machines).mean(Shape(16, 16), 1_000_000).transfer_s)


def test_compute_times_are_drawn_with_their_mean_spread_and_correlation():
    compute = ComputeProfile(mean_s=0.1, spread=0.3, correlation=0.5, factors=(1, 2))
    drawn = np.log(compute.draw(np.random.default_rng(0), (20_000, 1, 2))[:, 0])
    assert np.exp(drawn).mean(axis=0) == pytest.approx([0.1, 0.2], rel=0.01)
    assert drawn.std(axis=0) == pytest.approx([0.3, 0.3], rel=0.02)
    assert np.corrcoef(drawn.T)[0, 1] == pytest.approx(0.5, abs=0.02)
    sample = ComputeProfile(mean_s=2.0, sample_s=(1.0, 2.0, 3.0), correlation=0.9)
    drawn = sample.draw(np.random.default_rng(0), (20_000, 1, 2))[:, 0]
    assert sorted(np.unique(drawn)) == [1.0, 2.0, 3.0]
    assert drawn.mean() == pytest.approx(2.0, abs=0.02)
    assert np.corrcoef(drawn.T)[0, 1] > 0.7


def noise_left(topology, steps=4000):
    """V of a schedule as it is defined: noise of size 1 at every step, and what of it is a disagreement."""
    rng = np.random.default_rng(1)
    x = np.zeros((topology.workers, 64))
    rounds = topology.mixing_rounds()
    apart = 0.0
    for k in range(steps):
        x += rng.standard_normal(x.shape)
        apart += float(((x - x.mean(axis=0)) ** 2).sum() / (topology.workers - 1) / x.shape[1])
        rounds[k % len(rounds)].mix(x)
    return apart / steps


@pytest.mark.parametrize("name", ["complete", "ring", "one-peer-exponential", "star", "exponential"])
def test_the_disagreement_of_a_schedule_is_what_noise_leaves(name):
    topology = build(name, workers=8)
    assert disagreement.of_schedule(topology) == pytest.approx(noise_left(topology), rel=0.05)


def test_the_disagreement_of_gossip_is_a_little_more_than_what_noise_leaves():
    topology = build("ring", workers=8)
    rng = np.random.default_rng(2)
    x = np.zeros((8, 64))
    apart, steps = 0.0, 4000
    for _ in range(steps):
        x += rng.standard_normal(x.shape)
        apart += float(((x - x.mean(axis=0)) ** 2).sum() / 7 / 64)
        # Rate 1: 4 exchanges per step in expectation, on random edges.
        for edge in rng.integers(len(topology.edges), size=rng.poisson(4)):
            x[topology.edges[edge]] = x[topology.edges[edge]].mean(axis=0)
    # Exchanges also move energy from slow modes to fast ones, which the estimate leaves out.
    assert 1.0 < disagreement.of_gossip(topology, 1.0, accelerated=False) / (apart / steps) < 1.3


def test_momentum_helps_on_a_ring_and_not_on_a_complete_graph():
    ring, complete = build("ring", workers=64), build("complete", workers=64)
    assert disagreement.of_gossip(ring, 1, True) < 0.5 * disagreement.of_gossip(ring, 1, False)
    plain = disagreement.of_gossip(complete, 1, False)
    assert disagreement.of_gossip(complete, 1, True) == pytest.approx(plain, rel=1e-6)


def test_rare_averaging_is_seen_for_what_it_is():
    rho = [disagreement.contraction(disagreement.of_period(period)) for period in (1, 4, 8, 32)]
    assert rho[0] == 0
    assert rho == sorted(rho)
    assert rho[2] == pytest.approx(math.sqrt(1 - 2 / 9))
    assert rho[3] > 0.96


class Whisper(Method):
    """A method that the planner has no form for: pairs of the schedule, waited for."""

    name = "whisper"
    summary = "for this test"
    lockstep = True

    def step(self, worker):
        yield Update()
        group = worker.topology.group(worker.step, worker.rank).members
        mean = yield Mean(worker.x, round=worker.step, topic="model", group=group)
        worker.x.copy_(mean)


def test_a_method_without_a_form_is_predicted_by_running_it(monkeypatch):
    monkeypatch.setitem(METHODS, "whisper", Whisper)
    scene = Scene(cluster(4, 1), 10_000_000, num_runs=1)
    found = predict(scene, Candidate("whisper", "ring", {}))
    # ComputeProfile, and then 40 MB over 625 MB/s to the neighbour and back, in two latencies.
    assert found.step_s == pytest.approx(0.06 + 0.064 + 1e-4, rel=1e-3)
    assert found.bytes_per_step == pytest.approx(40e6, rel=1e-3)
    assert found.bound_by == BANDWIDTH
    # Rings of four agree after two rounds.
    assert found.contraction < 0.5
    assert Candidate("whisper", "star", {}) in list(candidates(4, 4, methods=("whisper",)))


def test_what_a_link_lets_through_at_once_counts_only_after_a_pause():
    table = Table(
        kind="mean", shape=Shape(2, 2), sizes_bytes=(4, 40_000_000), seconds=(0.0, 0.05), in_a_row=(0.0, 0.07)
    )
    machines = dataclasses.replace(cluster(2, 1), tables=(table,))
    scene = Scene(machines, 10_000_000, num_runs=1)
    # All-reduce computes for 60 ms before every message; overlapped messages follow each other.
    assert predict(scene, Candidate("allreduce", "complete", {})).step_s == pytest.approx(0.06 + 0.05, rel=1e-3)
    assert predict(scene, Candidate("overlap", "ring", {})).step_s == pytest.approx(0.07, rel=1e-3)
    # Where compute leaves a pause of 10 ms, so much of it is there again.
    longer = Scene(dataclasses.replace(machines, compute=ComputeProfile(mean_s=0.08)), 10_000_000, num_runs=1)
    assert longer.times.mean(Shape(2, 2), 40_000_000).after(0.01).seconds == pytest.approx(0.06, rel=1e-3)
