"""What every method must do. A new method is taken up by its row in the table."""

import dataclasses
import math
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.config import resolve
from gossamer.methods import METHODS
from gossamer.virtual.sim.cluster import Cluster
from gossamer.virtual.simulation import simulate
from plain_training import (
    SYNCHRONOUS,
    each_step,
    flat,
    kept_sum,
    make_precise_run,
    make_run,
    precise_task,
    recording_cluster,
    simulated,
    train_alone,
)

each_method = pytest.mark.parametrize("name", METHODS)
AVERAGING = [
    name for name, method in METHODS.items() if not method.preferred_optimizer and "mean" not in method.gives_up
]
REPLICATED = ["allreduce", "divisible"]
"""Methods whose workers have the same parameters after the same step."""

QUADRATIC = {"task": "quadratic", "dim": 6, "eval_every": 1000}


def hardware(draw):
    """A cluster of any kind, slow and uneven, as settings."""
    workers = draw(st.integers(1, 7))
    rank, factor = draw(st.integers(0, workers - 1)), draw(st.sampled_from([0.3, 1, 2.7, 6.1]))
    return {
        "workers": workers,
        "topology": draw(st.sampled_from(["ring", "complete", "star", "base"])),
        "compute": draw(st.sampled_from(["constant:1s", "lognormal:1s,0.5", "exponential:1s"])),
        "straggler": f"{rank}:{factor}",
        "link": draw(st.sampled_from(["inf", "1kb/0ms", "24b/100ms", "5b/2s"])),
        "clock": draw(st.sampled_from(["hardware", "hardware", "ideal"])),
        "seed": draw(st.integers(0, 1000)),
        "steps": 12,
    }


any_hardware = st.composite(hardware)()


@pytest.mark.parametrize("name", AVERAGING)
@given(hardware=any_hardware, end=st.integers(5, 140).map(lambda tenths: tenths / 10))
@settings(max_examples=40)
def test_the_sum_of_all_models_moves_only_by_the_workers_own_updates(name, hardware, end):
    cluster, added = recording_cluster(method=name, **hardware)
    before = kept_sum(cluster.workers)
    cluster.run_until(end)
    cluster.finish()
    torch.testing.assert_close(kept_sum(cluster.workers), before + added, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if "mean" not in method.gives_up])
def test_training_may_be_ended_at_any_moment(name):
    """Between two steps or in the middle of a wait: what was in flight is applied by all members, or by none."""
    machines = {"compute": "exponential:1s", "straggler": "1:5", "link": "24b/100ms", "workers": 4, "seed": 1}
    for end in (0.4 * k for k in range(1, 36)):
        if METHODS[name].preferred_optimizer:
            (run,) = resolve({"method": name, "warmup": 2, "period": 3, **machines}, task=precise_task(4))
            cluster = Cluster(run)
            cluster.run_until(end)
            cluster.finish()
            assert cluster.consensus() < 1e-15
        else:
            cluster, added = recording_cluster(method=name, **machines)
            before = kept_sum(cluster.workers)
            cluster.run_until(end)
            cluster.finish()
            torch.testing.assert_close(kept_sum(cluster.workers), before + added, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", REPLICATED)
@given(hardware=any_hardware)
@settings(max_examples=15)
def test_replicas_are_equal_after_every_step(name, hardware):
    seen = {}
    with each_step(name, lambda worker: seen.setdefault(worker.step, []).append(worker.x + 0.0)):
        (run,) = resolve({"method": name, **hardware}, task=precise_task(hardware["workers"]))
        result = simulate(run)
    assert result.final.consensus < 1e-15  # the mean of seven equal numbers is rounded
    assert len(seen) == 12
    for replicas in seen.values():
        assert len(replicas) == hardware["workers"]
        assert all(torch.equal(replicas[0], other) for other in replicas)


OPTIMIZERS = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.Adam}


@each_method
@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_one_worker_alone_is_plain_training(name, clock):
    run = make_precise_run(task="digits", method=name, workers=1, clock=clock, steps=7, **SYNCHRONOUS.get(name, {}))
    result = simulate(run)
    # On the ideal clock gradients strike at random times; as many as there were, they are those of plain training.
    optimizer = partial(OPTIMIZERS[run.config.optimizer], lr=run.config.lr)
    expected = flat(train_alone(run, optimizer, steps=result.final.total_steps))
    torch.testing.assert_close(result.model, expected, rtol=0, atol=1e-9)
    assert result.final.bytes_sent == 0
    assert result.final.consensus == 0.0


@each_method
@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_all_workers_come_to_the_known_optimum_of_the_quadratic(name, clock):
    run = make_run(**QUADRATIC, method=name, workers=6, topology="ring", clock=clock, lr=0.03, steps=250)
    result = simulate(run)
    optimum = run.task.train[0].mean(0)
    apart = (run.task.train[0] - optimum).square().sum(1).mean().sqrt()
    # Alone, each would go to its own optimum and stay `apart`.
    assert (result.model - optimum).norm() < 0.12 * apart
    assert result.final.consensus < 0.25 * apart
    assert result.final.loss == pytest.approx(float(apart**2) / 2, rel=0.02)


@each_method
def test_disagreement_at_the_start_is_averaged_away(name):
    result = simulated(task="consensus", dim=6, method=name, workers=8, topology="ring", clock="ideal", steps=80)
    start, end = result.history[0].consensus, result.final.consensus
    if name in REPLICATED:
        assert end == pytest.approx(start), "averages gradients, of which there are none"
    else:
        assert end < 1e-3 * start


# Bytes sent, as in the docstrings: P parameters of 4 bytes, n workers, all of them together.


def ring_allreduce(size_bytes, workers):
    return workers * round(2 * (workers - 1) / workers * size_bytes)


def swaps(result, run, parameters):
    return result.final.exchanges * 2 * 4 * parameters


def allreduce_bytes(result, run, parameters):
    return run.config.steps * ring_allreduce(4 * parameters, run.config.workers)


def localsgd_bytes(result, run, parameters):
    return run.config.steps // run.method_config.period * ring_allreduce(4 * parameters, run.config.workers)


def lasgd_bytes(result, run, parameters):
    return result.final.exchanges * ring_allreduce(4 * parameters, run.config.workers)


def overlap_bytes(result, run, parameters):
    pairs = [len(groups) for groups in run.topology.rounds]
    exchanges = sum(pairs[step % len(pairs)] for step in range(run.config.steps))
    return exchanges * 2 * 4 * parameters


def divisible_bytes(result, run, parameters):
    c, n = run.method_config, run.config.workers
    dense = ring_allreduce(4 * parameters, n)
    compressed = n * (n - 1) * 8 * math.ceil(parameters / c.ratio)
    background = ring_allreduce(4 * (2 * parameters + 1), n)
    late = run.config.steps - c.warmup
    # One dense vector more to drain what is left at the end.
    return c.warmup * dense + late * compressed + math.ceil(late / c.period) * background + dense


BYTES = {
    "a2cid2": swaps,
    "gossip": swaps,
    "overlap": overlap_bytes,
    "lasgd": lasgd_bytes,
    "divisible": divisible_bytes,
    "allreduce": allreduce_bytes,
    "localsgd": localsgd_bytes,
}


@each_method
@pytest.mark.parametrize("workers", [4, 6])
def test_bytes_sent_are_those_of_the_docstring(name, workers):
    assert name in BYTES, "write down how much the new method sends"
    run = make_run(task="digits", method=name, workers=workers, topology="ring", clock="ideal", steps=32, batch=4)
    result = simulate(run)
    assert result.final.bytes_sent == BYTES[name](result, run, result.model.numel()) > 0
    assert sum(result.worker_bytes_sent) == result.final.bytes_sent


@pytest.mark.parametrize("name", ["gossip", "a2cid2"])
@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_gossip_exchanges_at_its_rate(name, rate):
    for clock in ("ideal", "hardware"):
        result = simulated(
            task="consensus", dim=1, method=name, rate=rate, workers=32, topology="complete", clock=clock, steps=100,
            link="inf",
        )  # fmt: skip
        expected = rate * 32 * 100 / 2
        # Poisson, and on hardware those who find nobody at once fall behind a little.
        assert expected - 6 * math.sqrt(expected) < result.final.exchanges < expected + 4 * math.sqrt(expected)


@each_method
@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_the_same_seed_gives_the_same_run(name, clock):
    def history(seed):
        result = simulated(
            **QUADRATIC, method=name, workers=5, steps=15, noise=0.3, seed=seed, clock=clock, straggler="1:2"
        )
        return [dataclasses.replace(point, wall_s=0.0) for point in result.history], result.model

    (one, model), (same, same_model), (other, _) = history(3), history(3), history(4)
    assert one == same
    assert torch.equal(model, same_model)
    assert one != other


@each_method
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7])
def test_any_number_of_workers_will_do(name, workers):
    for topology in ("ring", "complete", "base"):
        result = simulated(**QUADRATIC, method=name, workers=workers, topology=topology, steps=12)
        assert result.final.total_steps >= 12 * workers
        assert math.isfinite(result.final.loss)
        assert len(result.history) >= 13


# Workers that leave and come


@each_method
@pytest.mark.parametrize("clock", ["ideal", "hardware"])
@pytest.mark.parametrize(
    ("fail", "join", "alive"),
    [
        ("2@5.3", "", 4),
        ("0@4.1,1@4.1,3@8", "", 2),
        ("", "2@6.2", 5),
        ("2@3.7", "2@9.4", 5),
        ("1@2,4@5.5", "4@7.2,1@7.2", 5),
        ("0@5,1@5,2@5,3@5", "0@9.9", 2),
    ],
)
def test_training_goes_on_when_workers_leave_and_join(name, clock, fail, join, alive):
    run = make_run(
        **QUADRATIC, method=name, workers=5, steps=30, clock=clock, fail=fail, join=join,
        compute="lognormal:1s,0.3", link="100b/10ms", lr=0.05,
    )  # fmt: skip
    cluster = Cluster(run)
    cluster.run_until(12.0)
    made = [worker.steps_done for worker in cluster.workers]
    cluster.run_until(30.0)
    living = cluster.alive()
    assert len(living) == alive
    for rank in range(5):
        later = cluster.workers[rank].steps_done - made[rank]
        assert (later > 5) if rank in living else (later == 0)
    cluster.finish()
    assert torch.isfinite(cluster.replicas.rows()[living]).all()
    if name in REPLICATED:
        rows = cluster.replicas.rows()[living]
        assert all(torch.equal(rows[0], row) for row in rows)


@each_method
@pytest.mark.parametrize("slow", range(5))
def test_nobody_waits_for_what_a_worker_missed_while_it_was_away(name, slow):
    """It comes back while others are at different steps, and some averagings are in flight without it."""
    for join in ("2@5.86", "2@8.2", "2@11.3"):
        cluster = Cluster(
            make_run(
                **QUADRATIC, method=name, workers=5, fail="2@3.1", join=join, straggler=f"{slow}:4",
                compute="lognormal:1s,0.4", link="50b/200ms", lr=0.05,
            )
        )  # fmt: skip
        cluster.run_until(20.0)
        made = [worker.steps_done for worker in cluster.workers]
        cluster.run_until(60.0)
        assert all(worker.steps_done > before for worker, before in zip(cluster.workers, made, strict=True))


@each_method
def test_a_worker_that_comes_back_has_forgotten_what_it_had(name):
    """What it takes over is what its peer has in common with all; the rest is new when the method begins with it."""
    run = make_run(
        **QUADRATIC, method=name, workers=4, fail="2@30.5", join="2@40.5", compute="constant:1s", link="inf", steps=50
    )
    cluster = Cluster(run)
    cluster.run_until(40.4)
    before = {vector: row + 0.0 for vector, row in cluster.workers[2].vectors.items()}
    began = []

    def begin(worker):
        peer = cluster.workers[1]
        assert worker.step == peer.step
        torch.testing.assert_close(worker.x + 0.0, peer.x + 0.0)
        for vector, row in worker.vectors.items():
            expected = peer.vector(vector) + 0.0 if vector in METHODS[name].shared else torch.zeros(len(row))
            assert torch.equal(row + 0.0, expected)
        assert set(worker.scalars) <= set(METHODS[name].shared)
        began.append(worker.rank)

    with mock.patch.object(cluster.method, "begin", begin):
        cluster.run_until(40.5)
    assert began == [2]
    assert cluster.workers[2].alive
    if name in ("a2cid2", "divisible"):
        assert any(vector.any() for vector in before.values())


@each_method
def test_a_complete_run_with_a_failure_ends_and_reports_it(name):
    result = simulated(
        **QUADRATIC, method=name, workers=4, steps=20, compute="constant:1s", link="inf", fail="3@4.5", join="3@9.5"
    )
    assert result.final.total_steps >= 80
    assert result.final.workers_alive == 4
    assert [line.split(" at ")[0] for line in result.events] == ["worker 3 gone", "worker 3 joined"]
    assert min(point.workers_alive for point in result.history) == 3


@each_method
def test_when_nobody_is_left_the_run_ends(name):
    result = simulated(**QUADRATIC, method=name, workers=3, steps=20, compute="constant:1s", fail="0@3.5,1@4.5,2@5.5")
    assert result.events[-1].startswith("no worker is left")
    assert 9 <= result.final.total_steps <= 15


@each_method
def test_a_worker_that_joins_contributes(name):
    """Its own optimum is far from the others': the model moves towards it only after it has joined."""
    alone, joined = (
        simulated(
            **QUADRATIC, method=name, workers=4, topology="complete", steps=150, lr=0.02, compute="constant:1s",
            link="inf", fail="3@0", join=join,
        )
        for join in ("", "3@30")
    )  # fmt: skip
    task = make_run(**QUADRATIC, method=name, workers=4).task
    of_all, of_three = task.train[0].mean(0), task.train[0][:3].mean(0)
    assert (alone.model - of_three).norm() < 0.3 * (of_all - of_three).norm()
    assert (joined.model - of_all).norm() < 0.3 * (of_all - of_three).norm()
