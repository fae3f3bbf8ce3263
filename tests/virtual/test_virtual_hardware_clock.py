"""Simulated times against closed forms computed from the same random numbers, and the description of hardware."""

import math

import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.hardware import ComputeTimes, HardwareConfig, NodeLayout, parse_link, parse_seconds
from gossamer.seeds import stream
from gossamer.virtual.compute.evaluator import Evaluator
from gossamer.virtual.simulation import simulate
from plain_training import each_step, make_run, simulated

# 64 floats of 4 bytes over a link of 1,000 bytes/s: 256 ms for a vector.
RUN = {"task": "quadratic", "dim": 64, "link": "8kbit/10ms", "compute": "lognormal:400ms,0.5", "steps": 30}


def compute_times(workers, steps, seed=0, mean=0.4, sigma=0.5, factors=None):
    """Return C_i(k) as the cluster draws them, by (step, rank)."""
    normal = np.array([stream(seed, "compute", rank).standard_normal(steps) for rank in range(workers)]).T
    return mean * np.exp(sigma * normal - sigma**2 / 2) * np.array(factors or [1.0] * workers)


def allreduce_time(members, latency=0.01, vector=0.256):
    return 2 * (members - 1) / members * vector + 2 * (members - 1) * latency


def finish_times(run):
    """Return the time at which each worker ended each step, by (step, rank), and the result."""
    ended = {}
    with each_step(run.config.method, lambda w: ended.__setitem__((w.step, w.rank), w.time * w.mean_gradient_time)):
        result = simulate(run)
    return ended, result


@pytest.mark.parametrize("workers", [1, 4, 5])
def test_allreduce_waits_for_the_slowest_and_for_the_network(workers):
    """F(k) = max_i (F(k−1) + C_i(k)) + T."""
    run = make_run(**RUN, method="allreduce", workers=workers, straggler="0:2")
    result = simulate(run)
    compute = compute_times(workers, 30, factors=[2.0] + [1.0] * (workers - 1))
    finish = 0.0
    for k in range(30):
        finish += compute[k].max() + allreduce_time(workers)
        assert result.history[k + 1].time == pytest.approx(finish, rel=1e-9)


@pytest.mark.parametrize(
    ("topology", "workers"), [("ring", 6), ("ring", 5), ("complete", 5), ("one-peer-exponential", 8)]
)
def test_overlap_hides_communication_behind_the_next_gradient(topology, workers):
    """F_i(k) = max(F_i(k−1) + C_i(k), max_{j in G_i} F_j(k−1) + T_G)."""
    run = make_run(**RUN, method="overlap", topology=topology, workers=workers)
    ended, _ = finish_times(run)
    compute = compute_times(workers, 40)
    before = compute[0].copy()
    for k in range(1, 30):
        now = before + compute[k]
        for rank in range(workers):
            group = run.topology.group(k - 1, rank).members
            if len(group) > 1:
                now[rank] = max(now[rank], max(before[j] for j in group) + allreduce_time(len(group)))
        for rank in range(workers):
            if (k, rank) in ended:
                assert ended[k, rank] == pytest.approx(now[rank], rel=1e-9), (k, rank)
        before = now
    assert len(ended) >= 30 * workers - workers


def test_localsgd_waits_only_every_few_steps():
    result = simulated(**{**RUN, "steps": 12}, method="localsgd", period=4, workers=3)
    rounds = compute_times(3, 12).reshape(3, 4, 3).sum(1).max(1) + allreduce_time(3)
    assert result.final.time == pytest.approx(rounds.sum(), rel=1e-9)


@pytest.mark.parametrize("method", ["gossip", "a2cid2", "lasgd"])
def test_workers_that_never_wait_run_at_their_own_pace(method):
    """A straggler makes fewer steps and slows down nobody else, however slow the network is."""
    result = simulated(
        task="quadratic", dim=4, method=method, workers=4, steps=100, compute="constant:1s", straggler="2:5",
        link="8bit/1s",
    )  # fmt: skip
    spread = result.final.worker_steps
    assert spread.max == pytest.approx(5 * spread.min, abs=5)
    assert spread.max == math.floor(result.final.time)
    assert result.final.utilization == 1.0
    assert result.worker_idle_time == [0.0] * 4


def test_compute_idle_time_and_utilization_by_hand():
    """Gradients of 1 s and 3 s, an all-reduce of 1 s: of every 4 s, one worker waits 3 and the other 1."""
    # One float: 4 bytes; among two workers an all-reduce sends one vector in each direction.
    result = simulated(
        task="quadratic", dim=1, method="allreduce", workers=2, steps=10, compute="constant:1s", straggler="1:3",
        link="4b/0ms",
    )  # fmt: skip
    assert result.final.time == pytest.approx(40.0)
    assert result.worker_compute_time == pytest.approx([10.0, 30.0])
    assert result.worker_idle_time == pytest.approx([30.0, 10.0])
    assert result.final.utilization == pytest.approx(40 / 80)
    assert result.final.bytes_sent == 10 * 2 * 4
    assert result.final.exchanges == 10
    assert result.final.samples == 20


def test_history_has_a_point_at_the_start_and_one_per_step():
    for method in ("allreduce", "gossip"):
        result = simulated(task="quadratic", method=method, workers=3, steps=20)
        assert len(result.history) == 21
        assert result.history[0].time == 0.0
        assert result.history[0].total_steps == 0
        assert [point.steps for point in result.history] == list(range(21))
        assert result.history[-1] is result.final
        times = [point.time for point in result.history]
        assert times == sorted(times)


@pytest.mark.parametrize("method", ["allreduce", "gossip", "a2cid2", "lasgd"])
@pytest.mark.parametrize("workers", [1, 4])
def test_gradients_begin_together_and_only_after_the_observation(method, workers, monkeypatch):
    taken = []
    evaluate = Evaluator.gradients

    def gradients(self, points, ranks, steps):
        taken.append((ranks, steps))
        return evaluate(self, points, ranks, steps)

    monkeypatch.setattr(Evaluator, "gradients", gradients)
    simulated(task="digits", method=method, workers=workers, steps=3, compute="constant:50ms", link="inf/0")
    assert taken == [(list(range(workers)), [step] * workers) for step in range(3)]


@pytest.mark.parametrize(
    ("spec", "mean", "deviation"),
    [("constant:20ms", 0.02, 0), ("lognormal:1s,0.5", 1, math.sqrt(math.exp(0.25) - 1)), ("exponential:2s", 2, 2)],
)
def test_compute_times_have_the_configured_mean(spec, mean, deviation):
    compute = ComputeTimes(spec, "1:3", 2)
    for rank, factor in ((0, 1), (1, 3)):
        rng = np.random.default_rng(rank)
        times = np.array([compute.draw(rank, rng) for _ in range(20000)])
        assert times.mean() == pytest.approx(factor * mean, rel=0.02)
        assert times.std() == pytest.approx(factor * deviation, rel=0.05, abs=1e-12)
        assert compute.mean(rank) == pytest.approx(factor * mean)


def test_compute_times_can_be_read_from_a_file(tmp_path):
    path = tmp_path / "times.txt"
    path.write_text("0.5\n1.5\n4\n")
    compute = ComputeTimes(f"sample:{path}", "", 1)
    rng = np.random.default_rng(0)
    assert {compute.draw(0, rng) for _ in range(100)} == {0.5, 1.5, 4.0}
    assert compute.mean(0) == 2.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("100ms", 0.1), ("0.1s", 0.1), ("0.1", 0.1), ("20us", 2e-5), ("3µs", 3e-6), ("1e-3 s", 1e-3)]
)
def test_parse_seconds(text, seconds):
    assert parse_seconds(text, "--compute") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "latency"),
    [("200mbit/5ms", 25e6, 0.005), ("1gbit", 125e6, 0.0), ("3MB/1s", 3e6, 1.0), ("inf", math.inf, 0.0), ("8bit", 1, 0)],
)
def test_parse_link(text, bytes_per_s, latency):
    link = parse_link(text, "--link")
    assert (link.bytes_per_s, link.latency_s) == (pytest.approx(bytes_per_s), latency)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"link": "fast"}, "--link is 'fast': expected a link such as"),
        ({"link": "0mbit"}, "expected a bandwidth above 0"),
        ({"link": "1gbit/soon"}, "expected a time such as"),
        ({"nodes": 3}, "--nodes is 3: expected a divisor of the 4 workers"),
        ({"slow_link": "0-1"}, "--slow-link has '0-1': expected NODE-NODE:LINK"),
        ({"slow_link": "0-9:1gbit"}, "two different nodes from 0 to 3"),
    ],
)
def test_impossible_networks_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        NodeLayout(HardwareConfig(**values), 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compute": "gamma:1s"}, "unknown value for --compute 'gamma:1s'"),
        ({"compute": "constant:0s"}, "expected a time above 0"),
        ({"compute": "constant:1s,2"}, "constant takes one number"),
        ({"compute": "constant:inf"}, "expected a time above 0"),
        ({"compute": "sample:/nowhere"}, "cannot read '/nowhere'"),
        ({"straggler": "9:2"}, "--straggler names worker 9: expected 0 to 3"),
        ({"straggler": "1:0"}, "infinitely fast"),
        ({"straggler": "1"}, "--straggler has '1': expected RANK:NUMBER"),
        ({"straggler": "1:nan"}, "--straggler has '1:nan'"),
        ({"fail": "1@-3"}, "expected a finite number of 0 or more"),
        ({"join": "4@3"}, "--join names worker 4"),
    ],
)
def test_impossible_machines_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        simulated(task="quadratic", workers=4, steps=2, **values)
