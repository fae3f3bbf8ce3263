"""The plan for quality: learning curves, trials, the ranking by the time to a target."""

import math
import signal
import threading

import numpy as np
import pytest

from gossamer.errors import InputError
from gossamer.plan.cluster_parser import ClusterParser
from gossamer.plan.learning_curve import when_reached
from gossamer.plan.quality import make_quality_plan, promising
from gossamer.plan.recommend import Workload, make_plan
from gossamer.plan.target import Target, parse_target

STEPS = [float(step) for step in range(1, 101)]


def power_law(noise=0.0, exponent=0.5):
    rng = np.random.default_rng(0)
    return [step**-exponent * math.exp(noise * rng.standard_normal()) for step in STEPS]


def test_a_target_that_was_seen_is_where_the_curve_crosses_it():
    reached = when_reached([0.0, 10.0, 20.0], [1.0, 0.5, 0.3], 0.4)
    assert (reached.steps, reached.low, reached.high, reached.extrapolated) == (15.0, 10.0, 20.0, False)
    first = when_reached([0.0, 10.0], [0.3, 0.2], 0.5)
    assert (first.steps, first.low, first.high) == (0.0, 0.0, 0.0)
    first = when_reached([8.0, 10.0], [0.3, 0.2], 0.5)
    assert (first.steps, first.low, first.high) == (8.0, 0.0, 8.0)


def test_the_interval_of_a_target_that_was_seen_is_as_wide_as_the_curve_is_noisy():
    exact = when_reached(STEPS, power_law(), 0.11)
    assert (exact.low, exact.high) == (82.0, 83.0)
    assert exact.steps == pytest.approx(0.11**-2, rel=1e-3)
    hits = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        noisy = [step**-0.5 * math.exp(0.03 * rng.standard_normal()) for step in STEPS]
        reached = when_reached(STEPS, noisy, 0.11)
        assert 5 < reached.high - reached.low < 40
        hits += reached.low <= 0.11**-2 <= reached.high
    assert hits >= 34


def test_a_power_law_is_extrapolated_exactly():
    reached = when_reached(STEPS, power_law(), 0.05)
    assert reached.extrapolated
    assert reached.steps == pytest.approx(400, rel=1e-6)
    assert reached.high == pytest.approx(reached.low, rel=1e-6)


def test_noise_widens_the_interval_which_holds_the_truth():
    reached = when_reached(STEPS, power_law(noise=0.05), 0.05)
    assert reached.low < 400 < reached.high
    assert reached.high > 1.1 * reached.low


@pytest.mark.parametrize(
    ("errors", "why"),
    [([0.5] * 100, "flat"), (power_law(exponent=0.05), "too far"), ([0.9, 0.8, 0.7], "too few")],
)
def test_nothing_is_said_where_nothing_is_known(errors, why):
    assert when_reached(STEPS[: len(errors)], errors, 0.01) is None, why


@pytest.mark.parametrize("text", ["accuracy", "acc=0.9", "accuracy=", "accuracy=90", "loss=-1", "loss=inf", "="])
def test_a_wrong_target_is_refused(text):
    with pytest.raises(InputError, match="--until is"):
        parse_target(text)


def cluster(between):
    document = {
        "cluster": {"nodes": 4, "workers_per_node": 1},
        "compute": {"step": "20ms", "spread": 0.1, "factors": [1, 1, 1, 4]},
        "links": {"between": between},
    }
    return ClusterParser("test", document).parse()


def plan_for(between):
    return make_plan(cluster(between), Workload("digits", 5018), methods=["allreduce", "lasgd", "a2cid2"])


def test_candidates_are_the_fastest_and_the_best_averaging_of_each_method():
    plan = plan_for("1gbit/50us")
    chosen = promising(plan)
    assert [each.candidate.method for each in chosen].count("allreduce") == 1
    assert {each.candidate.method for each in chosen} == {"allreduce", "lasgd", "a2cid2"}
    for method in ("lasgd", "a2cid2"):
        own = [each for each in plan.ranking if each.candidate.method == method and not plan.objection(each)]
        tried = [each for each in chosen if each.candidate.method == method]
        assert 1 <= len(tried) <= 2
        assert min(own, key=lambda each: each.step_s).step_s == tried[0].step_s


def test_with_a_straggler_the_winner_does_not_wait_for_it():
    told = []
    settings = {"task": "digits", "batch": 32}
    quality = make_quality_plan(plan_for("1gbit/50us"), settings, Target("accuracy", 0.85), 60.0, told.append)
    winner, baseline = quality.winner, quality.baseline
    assert winner.prediction.candidate.method != "allreduce"
    assert winner.time_s < baseline.time_s
    assert winner.time_s == pytest.approx(winner.reached.steps * winner.prediction.step_s)
    assert len(told) >= len(quality.trials)
    times = [trial.time_s for trial in quality.trials]
    assert times == sorted(times)
    assert quality.verdict.startswith(f"Take {winner.prediction.candidate.label}")
    document = quality.document()
    assert document["ranking"][0]["time_s"] == winner.time_s
    assert document["until"] == {"accuracy": 0.85}


def test_a_budget_that_ends_at_once_extrapolates_or_says_that_it_does_not_know():
    quality = make_quality_plan(plan_for("1gbit/50us"), {"task": "digits"}, Target("accuracy", 0.999), 0.5)
    for trial in quality.trials:
        reached = trial.reached
        assert reached is None or reached.extrapolated or min(trial.curves[0][1]) <= 0.001
    if all(math.isinf(trial.time_s) for trial in quality.trials):
        assert "larger --budget" in quality.verdict


def test_a_candidate_that_diverges_is_last():
    quality = make_quality_plan(plan_for("inf"), {"task": "digits", "lr": 1e4}, Target("accuracy", 0.9), 5.0)
    assert all(trial.diverged or trial.reached is None for trial in quality.trials)
    assert quality.winner is quality.baseline


def test_ctrl_c_ends_the_plan_not_only_a_trial():
    told, ended = [], threading.Event()

    def interrupt():
        # Again, as a user would: Python ignores what is raised while it deletes an object.
        pause_s = 0.5
        while not ended.wait(pause_s):
            signal.raise_signal(signal.SIGINT)
            pause_s = 5.0

    def tell(text):
        told.append(text)
        if len(told) == 1:
            thread.start()

    def plan():
        try:
            make_quality_plan(plan_for("1gbit/50us"), {"task": "digits"}, Target("accuracy", 0.9999), 60.0, tell)
        finally:
            ended.set()

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        plan()
    thread.join()
    assert len(told) == 1
