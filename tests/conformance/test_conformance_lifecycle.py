"""Workers of the virtual cluster that leave and come, with every method."""

from unittest import mock

import pytest
import torch

from gossamer.methods import METHODS
from gossamer.virtual.sim.cluster import Cluster
from plain_training import make_run, simulated

each_method = pytest.mark.parametrize("name", METHODS)

QUADRATIC = {"task": "quadratic", "dim": 6, "eval_every": 1000}


@each_method
def test_a_worker_that_comes_back_has_forgotten_what_it_had(name):
    """What it takes over is what its peer has in common with all; the rest is new when the method begins with it."""
    run = make_run(
        **QUADRATIC, method=name, workers=4, fail="2@30.5", join="2@40.5", compute="constant:1s", link="inf", steps=50
    )
    cluster = Cluster(run)
    cluster.run_until(40.4)
    before = {vector: row + 0.0 for vector, row in cluster.workers[2].vectors.items()}
    # Otherwise there is nothing to forget.
    assert not before or any(vector.any() for vector in before.values())
    began = []

    def begin(worker):
        peer = cluster.workers[1]
        assert worker.step == peer.step
        torch.testing.assert_close(worker.x + 0.0, peer.x + 0.0)
        for vector, row in worker.vectors.items():
            expected = peer.vector(vector) + 0.0 if vector in cluster.method.shared else torch.zeros(len(row))
            assert torch.equal(row + 0.0, expected)
        assert set(worker.scalars) <= set(cluster.method.shared)
        began.append(worker.rank)

    with mock.patch.object(cluster.method, "begin", begin):
        cluster.run_until(40.5)
    assert began == [2]
    assert cluster.workers[2].alive


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
