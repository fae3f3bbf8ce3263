"""Replicas in the virtual cluster and the planner: what moves inside, links between, files, verdicts."""

import dataclasses

import pytest

import gossamer
from gossamer.errors import InputError
from gossamer.hardware import HardwareConfig, Link, NodeLayout, parse_link
from gossamer.plan import cluster_file
from gossamer.plan.cluster_parser import ClusterParser
from gossamer.plan.cluster_spec import EXCHANGE, MEAN, ClusterSpec, ComputeProfile, GroupShape
from gossamer.plan.predict import INSIDE, Candidate, predict
from gossamer.plan.recommend import Workload, make_plan
from gossamer.plan.runtime_model import replay
from gossamer.plan.runtime_model.cluster_model import ClusterModel
from gossamer.plan.verify import replica_settings, to_verify
from gossamer.replica_time import ReplicaShape
from gossamer.virtual.comm.network import Network
from gossamer.virtual.sim.event_queue import EventQueue

LINK = Link(1e9, 0.0)
"""A millisecond for a megabyte."""


def test_ddp_waits_for_its_last_bucket():
    shape = ReplicaShape(2, "ddp", LINK)
    # One bucket: an all-reduce of two ranks sends every byte once, after the backward pass.
    assert shape.exposed_s(1e6, 0.1, 0.2) == pytest.approx(0.001)
    # Buckets of 1, 25 and 4 MB, ready evenly over the pass: only the last one is exposed.
    size = 30 << 20
    assert shape.exposed_s(size, 0.1, 0.2) == pytest.approx((4 << 20) / 1e9)
    # Without a pass to hide behind, all of it.
    assert shape.exposed_s(size, 0.0, 0.0) == pytest.approx(size / 1e9)
    assert ReplicaShape(1, "ddp", LINK).exposed_s(size, 0.0, 0.0) == 0.0


def test_fsdp_hides_all_but_the_ends_of_the_passes():
    shape = ReplicaShape(4, "fsdp", Link(1e9, 1e-3), blocks=10)
    # A message of a block: three quarters of a megabyte, and three latencies.
    message_s = 3 * 1e-3 + 0.75e-3
    assert shape.exposed_s(10e6, 1.0, 2.0) == pytest.approx(3 * message_s)
    # Passes as short as the messages' half: nine blocks wait for half a message forward, for two backward.
    exposed_s = shape.exposed_s(10e6, 10 * message_s / 2, 0.0)
    assert exposed_s == pytest.approx(message_s + 9 * message_s / 2 + 9 * 2 * message_s + 2 * message_s)
    on_cpus = dataclasses.replace(shape, overlaps=False)
    assert on_cpus.exposed_s(10e6, 1.0, 2.0) == pytest.approx(30 * message_s)


def test_a_measured_wait_holds_for_its_shape_and_messages_add_to_it():
    shape = ReplicaShape(2, "ddp", LINK, measured_s=0.004, measured_bytes=1e6)
    assert shape.exposed_s(1e6, 0.1, 0.2) == pytest.approx(0.004)
    # A megabyte more takes a millisecond more.
    assert shape.exposed_s(2e6, 0.0, 0.0) == pytest.approx(0.005)
    assert dataclasses.replace(shape, measured_s=0.0).exposed_s(1e6, 0.1, 0.2) == 0.0
    assert shape.with_ranks(2, "ddp") == shape
    assert shape.with_ranks(4, "ddp") == ReplicaShape(4, "ddp", LINK)
    assert shape.with_ranks(2, "fsdp") == ReplicaShape(2, "fsdp", LINK)


@pytest.mark.parametrize(
    ("inside", "across_s", "within_s"),
    # Across, 2 MB/s are shared by two links of a part each; within a node each link has 1 MB/s of its own.
    [("fsdp", 1e6 / 2e6, 0.5e6 / 1e6), ("ddp", 2e6 / 2e6, 1e6 / 1e6)],
)
def test_links_between_replicas_share_what_they_share(inside, across_s, within_s):
    config = HardwareConfig(link="16mbit/0ms", node_link="8mbit/0ms", nodes=2)
    for pair, expected in (((0, 2), across_s), ((0, 1), within_s)):
        queue, ended = EventQueue(), []
        network = Network(NodeLayout(config, 4), 4, queue, ReplicaShape(2, inside, LINK))
        network.swap(0.0, *pair, 1e6, ended.append)
        while queue.run_next():
            pass
        assert ended == [pytest.approx(expected)]


def test_a_virtual_replica_trains_as_a_worker_with_a_batch_of_all_its_ranks():
    common = {"task": "quadratic", "method": "localsgd", "steps": 6, "workers": 2, "compute": "constant:10ms"}
    one = gossamer.simulate(**common, batch=8)
    two = gossamer.simulate(**common, batch=4, replica_size=2, node_link="8mbit/1ms")
    assert two.model.tolist() == one.model.tolist()
    assert two.final.samples == one.final.samples
    # Each step waits for an all-reduce inside; and both ranks send all of the model.
    assert two.final.time > one.final.time + 6 * 2e-3
    assert two.final.bytes_sent == 2 * one.final.bytes_sent


def cluster(gbit=10.0, **compute):
    return ClusterSpec(
        nodes=4,
        per_node=4,
        compute=ComputeProfile(**{"mean_s": 0.1, **compute}),
        inside=Link(300e9, 5e-6),
        between=Link(gbit * 1e9 / 8, 5e-5),
    )


@pytest.mark.parametrize("inside", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("method", "topology", "size"),
    [("allreduce", "complete", 2), ("overlap", "ring", 4), ("a2cid2", "ring", 4), ("localsgd", "complete", 2)],
)
def test_the_closed_forms_agree_with_the_virtual_cluster(inside, method, topology, size):
    spec = cluster().with_replicas(size, inside)
    assert (spec.workers, spec.per_node, spec.ranks) == (16 // size, 4 // size, 16)
    model = ClusterModel(spec, 20_000_000, num_runs=1)
    by_formula = predict(model, Candidate(method, topology, {}))
    by_running = replay.forecast(model, method, topology, {})
    assert by_formula.step_s == pytest.approx(float(by_running.step_s[0]), rel=2e-3)
    assert by_formula.ranks == 16


def test_a_replica_is_as_slow_as_its_slowest_rank():
    spec = cluster(factors=(1.0,) * 15 + (3.0,)).with_replicas(4, "fsdp")
    times = ClusterModel(spec, 1000, num_runs=1).compute_s[0, 0]
    assert times == pytest.approx([0.1, 0.1, 0.1, 0.3], abs=1e-3)
    spread = ClusterModel(cluster(spread=0.3).with_replicas(4, "fsdp"), 1000)
    assert 1.15 < spread.mean_compute_s / 0.1 < 1.45


def test_measured_exchanges_are_those_of_all_links_at_once():
    model = ClusterModel(cluster().with_replicas(4, "fsdp"), 1_000_000)
    # 4 MB over the one NIC of each node, in four parts.
    assert model.comm.time(EXCHANGE, GroupShape(2, 2, 1), 4_000_000).transfer_s == pytest.approx(4e6 / 1.25e9)
    # A mean takes 6 messages of each link, and before and after it the ranks of a replica agree, 3 messages each.
    mean = model.comm.time(MEAN, GroupShape(4, 4, 1), 4_000_000)
    assert mean.latency_s == pytest.approx(6 * 5e-5 + 2 * 3 * 5e-6)
    in_ddp = ClusterModel(cluster().with_replicas(4, "ddp"), 1_000_000)
    assert in_ddp.comm.time(EXCHANGE, GroupShape(2, 2, 1), 4_000_000).transfer_s == pytest.approx(16e6 / 1.25e9)


def test_the_verdict_says_when_replicas_beat_everything_flat():
    workload = Workload("digits", 300_000_000)
    replicas = [(1, ""), (4, "ddp"), (4, "fsdp")]
    only = [Candidate("allreduce", "complete", {}), Candidate("overlap", "complete", {})]
    plan = make_plan(cluster(gbit=100), workload, only=only, replicas=replicas)
    assert (plan.winner.replica_size, plan.winner.workers) == (4, 4)
    assert plan.verdict.startswith("Take FSDP inside replicas of 4, overlap over complete between: ")
    assert "× the best without replicas (overlap over complete)." in plan.verdict
    # As docs/replicas.md says, so that a replica comes back.
    torchrun = "torchrun --standalone --max-restarts 3 --nproc-per-node 4 train.py"
    assert plan.command.startswith(f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 REPLICA=0 {torchrun}")
    assert 'Replica(int(os.environ["REPLICA"]), 4, "HOST:29400")' in plan.command
    row = next(row for row in plan.document()["ranking"] if row["replica_size"] == 4)
    assert row["inside"] in ("ddp", "fsdp")
    # The baseline is flat.
    assert plan.baselines[16].replica is None
    # On one node, gossamer train starts them.
    one_node = dataclasses.replace(cluster(), nodes=1, per_node=4)
    local = make_plan(one_node, workload, only=only[1:], replicas=[(2, "ddp")])
    command = local.command_of(local.ranking[0])
    assert command.endswith("--replica-size 2 --inside ddp --workers 2")
    assert replica_settings(local.ranking[0]) == {"replica_size": 2, "inside": "ddp"}
    assert to_verify(local)[0].replica is None


def test_fsdp_inside_and_a2cid2_between_beat_every_flat_plan():
    """The example of docs/planner.md."""
    spec = ClusterSpec(
        nodes=8,
        per_node=8,
        compute=ComputeProfile(mean_s=0.1),
        inside=parse_link("2400gbit/5us", ""),
        between=parse_link("25gbit/50us", ""),
    )
    replicas = [(1, ""), *((size, inside) for size in (2, 4, 8) for inside in ("ddp", "fsdp"))]
    plan = make_plan(spec, Workload("digits", 300_000_000), replicas=replicas)
    assert (plan.winner.replica.inside, plan.winner.candidate.method, plan.winner.workers) == ("fsdp", "a2cid2", 8)
    assert plan.verdict == (
        "Take FSDP inside replicas of 8, a2cid2, rate 0.5 over complete between: 101 ms per step, 8.54× all-reduce "
        "(862 ms, bound by inter-node bandwidth), 7.88× DDP with ideal overlap, 1.46× the best without replicas "
        "(localsgd, every 16)."
    )
    for flat in plan.ranking:
        if flat.replica is None and flat.step_s < 1.4 * plan.winner.step_s:
            assert flat.contraction > 0.95
    # Rates that replicas cannot reach are no candidates, for single ranks they are.
    rates = {(each.replica is None, each.candidate.options.get("rate")) for each in plan.predictions}
    assert {rate for flat, rate in rates if not flat} == {None, 0.5}
    assert {rate for flat, rate in rates if flat} == {None, 0.5, 1.0, 2.0}


@pytest.mark.parametrize("method", ["gossip", "a2cid2"])
def test_replicas_make_at_most_one_exchange_in_two_steps(method):
    # Links that carry any rate.
    spec = dataclasses.replace(cluster(), inside=Link(1e15, 0.0), between=Link(1e15, 0.0))
    flat = predict(ClusterModel(spec, 1000), Candidate(method, "complete", {"rate": 2.0}))
    assert flat.bytes_per_step == pytest.approx(2 * 4000, rel=1e-3)
    for size, inside, copies in ((2, "ddp", 2), (2, "fsdp", 1)):
        model = ClusterModel(spec.with_replicas(size, inside), 1000)
        fast, possible = (predict(model, Candidate(method, "complete", {"rate": rate})) for rate in (2.0, 0.5))
        assert fast.bytes_per_step == pytest.approx(copies * 0.5 * 4000, rel=1e-3)
        assert fast.contraction == pytest.approx(possible.contraction, abs=0.05)
        assert fast.contraction > flat.contraction


def test_slow_links_inside_are_named_as_the_bottleneck():
    spec = dataclasses.replace(cluster(), inside=Link(1e8, 0.0)).with_replicas(4, "fsdp")
    assert predict(ClusterModel(spec, 10_000_000), Candidate("a2cid2", "ring", {})).bound_by == INSIDE


FILE = {
    "cluster": {"nodes": 2, "workers_per_node": 1},
    "compute": {"step": "60ms"},
    "links": {"between": "25gbit/50us"},
    "replica": {"ranks": 8, "inside": "fsdp", "link": "2400gbit/5us", "blocks": 24, "overlap": False},
}


def test_a_file_that_describes_replicas(tmp_path):
    spec = ClusterParser("c.toml", FILE).parse()
    assert spec.replica == ReplicaShape(8, "fsdp", parse_link("2400gbit/5us", ""), 24, overlaps=False)
    assert (spec.workers, spec.ranks) == (2, 16)
    cluster_file.write(spec, tmp_path / "c.toml")
    assert cluster_file.read(tmp_path / "c.toml") == spec
    # Other groups of the same devices.
    assert spec.with_replicas(4, "ddp").replica == dataclasses.replace(spec.replica, ranks=4, inside="ddp")
    flat = spec.with_replicas(1, "")
    assert (flat.workers, flat.inside) == (16, spec.replica.link)
    # As a probe writes it: with a factor for each rank, and the wait of the model that was measured.
    wait = {"replica": {**FILE["replica"], "wait": "3ms"}, "model": {"parameters": 1000}}
    factors = {"compute": {"step": "60ms", "factors": [1.0] * 15 + [2.0]}}
    probed = ClusterParser("c.toml", {**FILE, **wait, **factors}).parse()
    assert probed.replica == dataclasses.replace(spec.replica, measured_s=0.003, measured_bytes=4000)
    cluster_file.write(probed, tmp_path / "c.toml")
    assert cluster_file.read(tmp_path / "c.toml") == probed
    with pytest.raises(InputError, match="has 2 entries for 16 ranks of replicas"):
        ClusterParser("c.toml", {**FILE, "compute": {"step": "60ms", "factors": [1, 2]}}).parse()


def test_a_rank_passes_over_its_own_part_only():
    costs = {"costs": {"mixing": "1GB"}}
    sharded = ClusterModel(ClusterParser("c.toml", {**FILE, **costs}).parse(), 1_000_000)
    assert sharded.update_s(2) == pytest.approx(2 * 4e6 / 8 / 1e9)
    whole = {**FILE["replica"], "inside": "ddp"}
    assert ClusterModel(ClusterParser("c.toml", {**FILE, **costs, "replica": whole}).parse(), 1_000_000).update_s(
        2
    ) == pytest.approx(2 * 4e6 / 1e9)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("ranks", None, "replica.ranks is missing"),
        ("inside", "tp", "expected ddp or fsdp"),
        ("overlap", "no", "expected true or false"),
        ("blocks", 0, "1 or more"),
        ("link", None, "replica.link is missing"),
        ("links", 3, "did you mean link?"),
        ("wait", "3ms", "give model.parameters too"),
    ],
)
def test_mistakes_in_it_are_named(field, value, words):
    replica = {**FILE["replica"], field: value}
    if value is None:
        del replica[field]
    with pytest.raises(InputError, match="cluster file") as error:
        ClusterParser("c.toml", {**FILE, "replica": replica}).parse()
    assert words in str(error.value)


def test_replicas_that_do_not_fit_a_node_are_refused():
    with pytest.raises(InputError, match="--replica-size is 3: expected a divisor of the 4 ranks of a node"):
        cluster().with_replicas(3, "ddp")
