"""Verification: which candidates run, for how long, and how they are timed."""

import pytest

from gossamer.hardware import Link
from gossamer.plan.cluster_spec import ClusterSpec, ComputeProfile
from gossamer.plan.predict import Candidate
from gossamer.plan.recommend import Workload, make_plan
from gossamer.plan.verify import Check, measure, num_steps, to_verify, train_settings
from gossamer.train.pacing import StepMeter

TWO = ClusterSpec(nodes=1, per_node=2, compute=ComputeProfile(mean_s=0.03, factors=(1, 2)), inside=Link(1e9, 1e-4))


def test_all_reduce_and_the_winner_are_run_and_each_method_once():
    plan = make_plan(TWO, Workload("quadratic", 10_000))
    methods = [prediction.candidate.method for prediction in to_verify(plan)]
    assert methods[:2] == ["allreduce", plan.winner.candidate.method]
    assert len(set(methods)) == len(methods) == 4


def test_runs_are_whole_periods_and_neither_too_short_nor_too_long():
    every_8 = Candidate("localsgd", "complete", {"period": 8})
    assert num_steps(0.1, every_8, seconds=10) == 104
    assert num_steps(10.0, every_8) == 24
    assert num_steps(1e-6, Candidate("overlap", "ring", {})) == 400


def test_a_candidate_as_settings_of_train():
    values = train_settings(Candidate("gossip", "ring", {"rate": 2.0}), {"task": "digits"}, 30)
    assert values == {"task": "digits", "method": "gossip", "rate": 2.0, "steps": 30, "topology": "ring"}
    assert "topology" not in train_settings(Candidate("lasgd", "complete", {"period": 1}), {}, 30)


def test_the_first_quarter_of_a_short_run_does_not_count():
    meter = StepMeter()
    assert meter.mean_s() == 0.0
    for ended in (5.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0):
        meter.add(ended)
    assert meter.mean_s() == 1.0


def test_an_error_is_relative_to_what_was_measured():
    plan = make_plan(TWO, Workload("quadratic", 10_000))
    assert Check(plan.ranking[0], 2 * plan.ranking[0].step_s).error == -0.5


def test_real_workers_are_timed():
    settings = {"task": "quadratic", "workers": 2, "compute": "constant:30ms", "straggler": "1:2"}
    candidate = Candidate("allreduce", "complete", {})
    step_s = measure(train_settings(candidate, settings, 12), None, "verify")
    # The slower worker takes 60 ms; communication depends on the machine.
    assert step_s >= 0.06


def test_only_whole_periods_are_averaged():
    meter, now = StepMeter(period=8), 0.0
    for step in range(1, 25):
        # Every eighth step takes longer.
        now += 5.0 if step % 8 == 0 else 1.0
        meter.add(now)
    assert meter.mean_s() == pytest.approx((7 * 1.0 + 5.0) / 8)
