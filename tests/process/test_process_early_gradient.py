"""Gradients that are sent while backward still runs: the result is that of sending them afterwards."""

import early_loops
import pytest
import torch
from early_loops import EARLY, KINDS, STEPS
from real_workers import RealWorkers

import gossamer
from gossamer.effects import Mean, Update, yields
from gossamer.errors import MethodError
from gossamer.methods.allreduce import AllReduce
from gossamer.process.collectives.bucket_mean import divide
from gossamer.process.runtime import early_gradient


# A sum of three is made around a ring, one of two in an exchange.
@pytest.mark.parametrize(("count", "kinds"), [(2, list(KINDS)), (3, ["plain", "clipping", "some accumulated"])])
def test_any_loop_ends_with_the_weights_that_it_has_without_buckets(count, kinds, tmp_path):
    with RealWorkers(count, script=early_loops.train, kinds=kinds, folder=str(tmp_path)) as workers:
        for name in kinds:
            reports = [worker.at(name) for worker in workers]
            assert all(report["steps"] == STEPS and report["repeated"] == 0 for report in reports), name
            assert len({report["digest"] for report in reports}) == 1, name
            if count == 2:
                # A sum of two has one order only.
                assert all(report["same"] for report in reports), name
            early_steps = [sum(number > 0 for number in report["sent"]) for report in reports]
            # Where what was sent did not hold, the following steps send nothing early.
            assert all(number == STEPS if name in EARLY else 0 < number < STEPS for number in early_steps), name


def test_buckets_go_from_the_last_parameter_to_the_first():
    assert [tuple(bucket) for bucket in divide([4, 6, 7, 20, 22], 5)] == [(20, 22, 4), (7, 20, 3), (4, 7, 1), (0, 4, 0)]
    assert [tuple(bucket) for bucket in divide([4, 6], 10)] == [(0, 6, 0)]


def test_a_worker_dies_in_the_middle_of_backward_with_buckets_under_way():
    victim, dies_at = 2, 4
    with RealWorkers(3, script=early_loops.train_until_killed, dies=(victim, dies_at)) as workers:
        workers[victim].died()
        ends = workers.finished([0, 1])
    # The step in which it died is made again, with the same gradients.
    assert [(end["steps"], end["repeated"], end["dropped"]) for end in ends] == [(STEPS, 1, 0)] * 2
    assert ends[0]["weights"] == ends[1]["weights"]
    # Every step is the mean of those who were there, and no gradient of these is missing.
    trainings = [early_loops.chain_for(rank) for rank in range(3)]
    for step in range(STEPS):
        present = trainings if step < dies_at else trainings[:2]
        for training in present:
            training.optimizer.zero_grad()
            training.loss().backward()
        for parameters in zip(*(training.model.parameters() for training in present), strict=True):
            mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
            for parameter in parameters:
                parameter.grad = mean
        for training in present:
            training.optimizer.step()
    assert ends[0]["weights"] == pytest.approx(trainings[0].weights(), rel=1e-4, abs=1e-6)


def test_a_method_that_declares_the_mean_of_its_gradient_begins_with_it():
    class Scaled(AllReduce):
        @yields(Mean, Update, gradient_topic="gradient")
        def step(self, worker):
            yield Update((yield Mean(worker.gradient * 2, worker.step, "gradient")))

    class Late(AllReduce):
        @yields(Mean, Update, gradient_topic="gradient")
        def step(self, worker):
            yield Update()

    for method, said in ((Scaled, "sends something else than the gradient"), (Late, "and began with Update")):
        training = early_loops.chain_for(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(early_gradient, "BUCKET_BYTES", early_loops.SMALL_BYTES)
            swarm = gossamer.join(training.model, training.optimizer, method=method)
        with pytest.raises(MethodError, match=said):
            training.plain_step()
        swarm.close()
