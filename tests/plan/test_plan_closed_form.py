"""The closed forms of the runtime model, compared with the virtual cluster and computed by hand."""

import dataclasses

import numpy as np
import pytest

from gossamer.effects import Mean, Update, yields
from gossamer.hardware import Link
from gossamer.methods import METHODS, Method
from gossamer.plan.cluster_spec import (
    GATHER,
    MEAN,
    ClusterSpec,
    ComputeProfile,
    Costs,
    GroupShape,
    TimingTable,
    group_shapes,
)
from gossamer.plan.predict import BANDWIDTH, COMPUTE, LATENCY, SLOWEST, Candidate, candidates, predict
from gossamer.plan.runtime_model import replay
from gossamer.plan.runtime_model.closed_form import FORMS
from gossamer.plan.runtime_model.cluster_model import ClusterModel
from gossamer.plan.runtime_model.comm_times import CommTimes
from gossamer.topology import build

TOPOLOGIES = ("ring", "complete", "one-peer-exponential", "alternating-exponential-ring")


def cluster(nodes=4, per_node=2, gbit=5.0, **compute):
    return ClusterSpec(
        nodes=nodes,
        per_node=per_node,
        compute=ComputeProfile(**{"mean_s": 0.06, **compute}),
        inside=Link(12.5e9, 1e-5),
        between=Link(gbit * 1e9 / 8, 5e-5),
    )


ALL = [each for each in candidates(8, 4, topologies=TOPOLOGIES) if each.options.get("rate", 1.0) == 1.0]


def test_every_form_is_that_of_a_method():
    assert set(FORMS) <= set(METHODS.values())


@pytest.mark.parametrize("parameters", [1_000_000, 50_000_000])
@pytest.mark.parametrize("candidate", ALL, ids=lambda each: f"{each.label} {each.topology}")
def test_constant_compute_agrees_with_the_virtual_cluster_to_a_thousandth(candidate, parameters):
    model = ClusterModel(cluster(), parameters, num_runs=1)
    by_formula = predict(model, candidate)
    by_running = replay.forecast(model, candidate.method, candidate.topology, candidate.options)
    assert by_formula.step_s == pytest.approx(float(by_running.step_s[0]), rel=1e-3)
    if METHODS[candidate.method].lockstep:
        assert by_formula.bytes_per_step == pytest.approx(by_running.bytes_per_step, rel=1e-3)


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
def test_slow_and_uneven_workers_with_a_card_each(candidate, compute):
    model = ClusterModel(cluster(4, 1, **compute), 10_000_000, num_runs=16)
    by_formula = predict(model, candidate)
    running = [
        replay.forecast(dataclasses.replace(model, seed=seed), candidate.method, candidate.topology, candidate.options)
        for seed in range(4)
    ]
    measured = float(np.mean([each.step_s for each in running]))
    assert by_formula.step_s == pytest.approx(measured, rel=0.02)


def test_shared_cards_are_predicted_pessimistically():
    # The forms let all groups of a round use a card at once; in the virtual cluster, uneven workers use it in turn.
    model = ClusterModel(cluster(spread=0.2), 10_000_000)
    by_formula = predict(model, Candidate("overlap", "ring", {}))
    by_running = replay.forecast(model, "overlap", "ring", {})
    assert 1.0 <= by_formula.step_s / float(by_running.step_s[0]) < 1.15


@pytest.mark.parametrize("candidate", SYNCHRONOUS, ids=lambda each: f"{each.label} {each.topology}")
def test_measured_tables_agree_with_the_virtual_cluster(candidate):
    sizes = (4096, 1_000_000, 100_000_000)

    def table(kind, members, at_once=1):
        return TimingTable(
            kind=kind,
            shape=GroupShape(members, members, at_once),
            sizes_bytes=sizes,
            seconds=(0.002, 0.01, 0.9 * members),
        )

    tables = (table("mean", 4), table("mean", 2), table("exchange", 2), table("gather", 4))
    model = ClusterModel(dataclasses.replace(cluster(4, 1), tables=tables), 10_000_000, num_runs=1)
    by_formula = predict(model, candidate)
    by_running = replay.forecast(model, candidate.method, candidate.topology, candidate.options)
    # The virtual cluster takes two concurrent messages of one worker for two groups on one node.
    tolerance = 0.05 if candidate.method == "divisible" else 1e-3
    assert by_formula.step_s == pytest.approx(float(by_running.step_s[0]), rel=tolerance)


def test_all_reduce_by_hand():
    # 8 workers on 4 nodes at 5 Gbit/s: 14/8 of 40 MB over 625 MB/s, 14 latencies, and the slowest of 8.
    model = ClusterModel(cluster(factors=(1, 1, 1, 1, 1, 1, 1, 2)), 10_000_000, num_runs=1)
    expected = 0.12 + 14 / 8 * 40e6 / 625e6 + 14 * 5e-5
    assert predict(model, ALL[0]).workers == 8
    assert predict(model, Candidate("allreduce", "complete", {})).step_s == pytest.approx(expected)


def test_overlapped_pairs_by_hand():
    # Two workers: compute hides what it can of 40 MB over 625 MB/s.
    model = ClusterModel(cluster(2, 1), 10_000_000, num_runs=1)
    assert predict(model, Candidate("overlap", "ring", {})).step_s == pytest.approx(0.0641, rel=1e-3)
    slow = ClusterModel(cluster(2, 1, gbit=0.5), 10_000_000, num_runs=1)
    assert predict(slow, Candidate("overlap", "ring", {})).step_s == pytest.approx(0.6401, rel=1e-3)


def test_slowdown_and_passes_over_the_parameters_take_time():
    costs = Costs(slowdown=1.5, mixing_bytes_per_s=4e9, compressing_bytes_per_s=4e8, overhead_s=0.001)
    spec = dataclasses.replace(cluster(2, 1), costs=costs)
    model = ClusterModel(spec, 10_000_000, num_runs=1)
    # 64.1 ms of message in flight: compute of 60 ms takes 60 + 64.1·(1 − 1/1.5) = 81.4 ms; two passes of 10 ms, 1 ms.
    step = predict(model, Candidate("overlap", "ring", {})).step_s
    assert step == pytest.approx(0.06 + 0.06405 / 3 + 0.021, rel=1e-3)
    # All-reduce does not compute while its message is in flight.
    assert predict(model, Candidate("allreduce", "complete", {})).step_s == pytest.approx(
        0.06 + 0.021 + 0.0641, rel=1e-3
    )


@pytest.mark.parametrize(
    ("spec", "parameters", "bound"),
    [
        (cluster(gbit=100), 10_000, COMPUTE),
        (cluster(gbit=100, factors=(1,) * 7 + (3,)), 10_000, SLOWEST),
        (cluster(gbit=1), 10_000_000, BANDWIDTH),
        (dataclasses.replace(cluster(), between=Link(1e9, 0.05)), 10_000, LATENCY),
    ],
)
def test_the_bottleneck_of_a_step(spec, parameters, bound):
    assert predict(ClusterModel(spec, parameters), Candidate("allreduce", "complete", {})).bound_by == bound


def test_gossip_is_bound_by_compute():
    model = ClusterModel(cluster(gbit=0.1, factors=(1,) * 7 + (3,)), 10_000_000)
    prediction = predict(model, Candidate("gossip", "ring", {"rate": 1.0}))
    assert prediction.bound_by == COMPUTE
    # Seven workers take 60 ms per step, one takes 180.
    assert prediction.step_s == pytest.approx(8 / (7 / 0.06 + 1 / 0.18))


def test_shapes_of_a_round():
    groups = build("alternating-exponential-ring", workers=16, nodes=4).rounds[0]
    shapes = group_shapes([group.members for group in groups], 4)
    assert sorted((shape.members, shape.nodes, shape.at_once) for shape in shapes) == [(4, 1, 1), (4, 1, 1), (8, 2, 1)]
    across = build("one-peer-exponential", workers=16).rounds[2]
    assert set(group_shapes([group.members for group in across], 4)) == {GroupShape(2, 2, 4)}


def test_notes_list_what_is_extrapolated():
    table = TimingTable(kind="mean", shape=GroupShape(4, 4), sizes_bytes=(4096, 1_000_000), seconds=(0.001, 0.02))
    times = CommTimes(dataclasses.replace(cluster(4, 1), tables=(table,)))
    times.time(MEAN, GroupShape(4, 4), 1_000_000)
    assert not times.notes
    times.time(MEAN, GroupShape(4, 4), 2_000_000)
    times.time(MEAN, GroupShape(64, 64), 1_000_000)
    times.time(GATHER, GroupShape(4, 4), 1_000)
    assert list(times.notes) == [
        "messages of 2 MB: measured up to 1 MB",
        "groups of 64: measured up to 4",
        "no gather was measured: its time follows from the links",
    ]


def test_a_larger_group_takes_the_time_of_the_formula_times_its_error():
    spec = cluster(4, 1)
    exact = CommTimes(spec).time(MEAN, GroupShape(4, 4), 1_000_000)
    table = TimingTable(
        kind="mean",
        shape=GroupShape(4, 4),
        sizes_bytes=(4096, 1_000_000),
        seconds=(exact.latency_s, exact.latency_s + 3 * exact.transfer_s),
    )
    more = CommTimes(dataclasses.replace(spec, tables=(table,))).time(MEAN, GroupShape(16, 16), 1_000_000)
    assert more.transfer_s == pytest.approx(3 * CommTimes(spec).time(MEAN, GroupShape(16, 16), 1_000_000).transfer_s)


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


class WaitingGossip(Method):
    """A method without a closed form: it waits for the means of the schedule's groups."""

    name = "waiting-gossip"
    summary = "for this test"

    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        group = worker.topology.group(worker.step, worker.rank).members
        mean = yield Mean(worker.x, round=worker.step, topic="model", group=group)
        worker.x.copy_(mean)


def test_a_method_without_a_closed_form_is_predicted_by_running_it(monkeypatch):
    monkeypatch.setitem(METHODS, "waiting-gossip", WaitingGossip)
    model = ClusterModel(cluster(4, 1), 10_000_000, num_runs=1)
    prediction = predict(model, Candidate("waiting-gossip", "ring", {}))
    # Compute, and then 40 MB over 625 MB/s to the neighbour and back, in two latencies.
    assert prediction.step_s == pytest.approx(0.06 + 0.064 + 1e-4, rel=1e-3)
    assert prediction.bytes_per_step == pytest.approx(40e6, rel=1e-3)
    assert prediction.bound_by == BANDWIDTH
    # A ring of four: the first round of pairs takes out two of three directions, the second the rest.
    assert prediction.contraction == pytest.approx((1 - 1 / (1 + 1 / 3)) ** 0.5, abs=0.02)
    assert Candidate("waiting-gossip", "star", {}) in list(candidates(4, 4, methods=("waiting-gossip",)))


def test_a_burst_counts_only_after_a_pause():
    table = TimingTable(
        kind="mean", shape=GroupShape(2, 2), sizes_bytes=(4, 40_000_000), seconds=(0.0, 0.05), in_a_row=(0.0, 0.07)
    )
    spec = dataclasses.replace(cluster(2, 1), tables=(table,))
    model = ClusterModel(spec, 10_000_000, num_runs=1)
    # All-reduce computes for 60 ms before every message; overlapped messages follow each other.
    assert predict(model, Candidate("allreduce", "complete", {})).step_s == pytest.approx(0.06 + 0.05, rel=1e-3)
    assert predict(model, Candidate("overlap", "ring", {})).step_s == pytest.approx(0.07, rel=1e-3)
    # A pause of 10 ms restores 10 ms of the burst.
    longer = ClusterModel(dataclasses.replace(spec, compute=ComputeProfile(mean_s=0.08)), 10_000_000, num_runs=1)
    assert longer.comm.time(MEAN, GroupShape(2, 2), 40_000_000).after_pause(0.01).seconds == pytest.approx(
        0.06, rel=1e-3
    )


@pytest.mark.parametrize("method", ["gossip", "a2cid2", "overlap", "lasgd", "localsgd", "allreduce"])
def test_models_are_planned_with_the_bytes_that_travel(method):
    topology = "ring" if METHODS[method].uses_topology else "complete"
    exact, rounded = (
        predict(ClusterModel(cluster(gbit=400.0), 10_000_000, num_runs=1, wire=codec), Candidate(method, topology, {}))
        for codec in ("float32", "int8")
    )
    if method == "allreduce":
        assert rounded.bytes_per_step == exact.bytes_per_step
    else:
        # Over a fast network, where smaller messages do not let workers exchange more often.
        assert rounded.bytes_per_step / exact.bytes_per_step == pytest.approx(0.2515, rel=0.08)
    assert rounded.step_s <= exact.step_s
