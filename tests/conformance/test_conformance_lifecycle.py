"""Workers of the virtual cluster that leave and come, with every method."""

import pytest
import torch

from gossamer.methods import METHODS
from gossamer.virtual.sim.cluster import Cluster
from plain_training import make_run, simulated

each_method = pytest.mark.parametrize("name", METHODS)

QUADRATIC = {"task": "quadratic", "dim": 6, "eval_every": 1000}


@each_method
def test_a_worker_that_comes_back_has_forgotten_what_it_had(name):
    """It takes over what its peer has in common with all; the rest of the method's vectors begins anew."""
    run = make_run(
        **QUADRATIC, method=name, workers=4, fail="2@30.5", join="2@40.5", compute="constant:1s", link="inf", steps=50
    )
    cluster = Cluster(run)
    set_by_begin = set(cluster.workers[2].vectors)
    cluster.run_until(40.4)
    before = {vector: row + 0.0 for vector, row in cluster.workers[2].vectors.items()}
    cluster.run_until(40.5)
    worker = cluster.workers[2]
    assert worker.alive
    assert worker.step == cluster.workers[1].step
    torch.testing.assert_close(worker.x + 0.0, cluster.workers[1].x + 0.0)
    for vector, row in worker.vectors.items():
        if vector in METHODS[name].shared:
            assert torch.equal(row + 0.0, cluster.workers[1].vector(vector) + 0.0)
        elif vector not in set_by_begin:
            assert not (row + 0.0).any()
    # Otherwise there was nothing to forget.
    assert not before or any(vector.any() for vector in before.values())


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
