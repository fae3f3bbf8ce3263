"""What A²CiD² is for: on a ring it agrees many times sooner than gossip, on a complete graph it need not."""

import statistics

import numpy as np
import pytest

from plain_training import cluster_of, simulated

SEEDS = range(3)
REACHED = 1e-4


def averaging(method, topology, workers, seed):
    """Pure averaging: the cluster, and its consensus distance at the start."""
    cluster = cluster_of(
        task="consensus", dim=8, method=method, topology=topology, workers=workers, clock="ideal", rate=1.0, seed=seed
    )
    return cluster, cluster.consensus()


def time_to_agree(method, topology, workers, seed, every):
    """Return the time at which the consensus distance is 1e-4 of the start, interpolated exponentially."""
    cluster, start = averaging(method, topology, workers, seed)
    time, before = 0.0, 1.0
    while True:
        cluster.run_until(time + every)
        now = cluster.consensus() / start
        if now <= REACHED:
            return time + every * float(np.log(before / REACHED) / np.log(before / now))
        time, before = time + every, now
        assert time < 5000


def test_on_a_ring_of_64_agreement_comes_at_least_5_times_sooner():
    accelerated = statistics.median(time_to_agree("a2cid2", "ring", 64, seed, 10.0) for seed in SEEDS)
    # Gossip never increases the distance, so one evaluation five times later is enough.
    still_apart = []
    for seed in SEEDS:
        cluster, start = averaging("gossip", "ring", 64, seed)
        cluster.run_until(5 * accelerated)
        still_apart.append(cluster.consensus() > REACHED * start)
    assert sum(still_apart) >= 2, f"a2cid2 took {accelerated}"


def test_on_the_complete_graph_both_take_the_same_time():
    times = {
        method: statistics.median(time_to_agree(method, "complete", 64, seed, 1.0) for seed in SEEDS)
        for method in ("a2cid2", "gossip")
    }
    assert times["a2cid2"] == pytest.approx(times["gossip"], rel=0.1)


def test_with_gradients_the_workers_stay_twice_as_close():
    def late_consensus(method):
        result = simulated(
            task="quadratic", dim=8, method=method, topology="ring", workers=64, clock="ideal", rate=1.0,
            optimizer="sgd", momentum=0.0, lr=0.01, steps=600, eval_every=600,
        )  # fmt: skip
        late = [point.consensus for point in result.history if point.time >= 300]
        assert len(late) >= 300
        return statistics.fmean(late)

    assert 2 * late_consensus("a2cid2") <= late_consensus("gossip")
