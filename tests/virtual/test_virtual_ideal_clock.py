"""The papers' clock: Poisson gradients and exchanges, one gradient per worker and unit of time in expectation."""

import math

import numpy as np
import pytest

from gossamer.topology import build
from gossamer.virtual.comm.pairing import PoissonEdges
from plain_training import cluster_of, simulated


def test_gradients_are_a_poisson_process():
    cluster = cluster_of(task="consensus", dim=1, method="gossip", workers=200, topology="ring", clock="ideal")
    cluster.run_until(50.0)
    counts = np.array([worker.steps_done for worker in cluster.workers])
    assert abs(counts.sum() - 10_000) < 4 * math.sqrt(10_000)
    # The variance of a Poisson count equals its mean; 200 counts estimate it to about 10%.
    assert 0.65 < counts.var() / counts.mean() < 1.4


@pytest.mark.parametrize("rate", [0.5, 1.0, 3.0])
def test_exchanges_happen_at_their_rate(rate):
    cluster = cluster_of(
        task="consensus", dim=1, method="gossip", workers=40, topology="ring", clock="ideal", rate=rate
    )
    cluster.run_until(100.0)
    expected = rate * 40 * 100 / 2
    assert abs(cluster.exchanges.count - expected) < 4 * math.sqrt(expected)
    assert sum(worker.exchanges for worker in cluster.workers) == 2 * cluster.exchanges.count


def test_every_edge_fires_at_its_own_rate():
    topology = build("star", 5)
    edges = PoissonEdges(topology, 1.0, np.random.default_rng(0))
    total, counts = 0.0, dict.fromkeys(map(tuple, topology.edges.tolist()), 0)
    for _ in range(20_000):
        gap, a, b = edges.draw()
        total += gap
        counts[a, b] += 1
    for (a, b), rate in zip(counts, topology.rates(1.0), strict=True):
        # λ_ij = (r/2)(1/d_i + 1/d_j), with degrees 4 and 1.
        assert rate == pytest.approx(0.625)
        assert counts[a, b] / total == pytest.approx(rate, rel=0.06)


@pytest.mark.parametrize("method", ["allreduce", "overlap", "localsgd", "divisible"])
def test_methods_in_lockstep_make_one_step_per_unit(method):
    result = simulated(task="quadratic", method=method, workers=4, clock="ideal", steps=12)
    assert [(point.time, point.total_steps) for point in result.history] == [(float(t), 4 * t) for t in range(13)]
    assert result.final.utilization == 1.0


def test_history_has_one_point_per_unit_of_time():
    result = simulated(task="quadratic", method="a2cid2", workers=4, clock="ideal", steps=30)
    assert [point.time for point in result.history] == [float(t) for t in range(31)]
