"""The sentence that opens the page, and the time to a target, for all kinds of runs."""

from pathlib import Path

import pytest

from gossamer.report.headline import find_targets, headline
from gossamer.report.runs import StoredRun

SPREAD = {"mean": None, "min": None, "max": None}


def make_run(field, values, *, interval=1.0, final=None, finished=True, world="virtual", time_unit="s", task="digits"):
    """A run whose points are ``interval`` apart and hold ``values`` in ``field``."""
    points = []
    for k, value in enumerate(values):
        figures = {"loss": None, "train_loss": None, "accuracy": None, "worker_accuracy": SPREAD, "consensus": None}
        figures[field] = {**SPREAD, "mean": value} if field == "worker_accuracy" else value
        counts = {"steps": k, "total_steps": 4 * k, "bytes_sent": 1000 * k, "utilization": 0.5, "workers_alive": 4}
        points.append({"time": interval * k, **counts, **figures})
    summary = {**points[-1], "events": [], **(final or {})} if finished else None
    about = {"world": world, "time_unit": time_unit}
    return StoredRun(Path("run"), about, {"task": task, "workers": 4, "steps": 8}, points, summary, None, [])


def sentence(**runs):
    return headline(list(runs), list(runs.values()), find_targets(list(runs.values())))


CURVE = [0.1, 0.5, 0.8, 0.92, 0.957]
"""Of an accuracy."""


def test_the_fastest_run_is_compared_with_the_first_one():
    slow = make_run("accuracy", CURVE, interval=3.0, final={"consensus": 0.0, "bytes_sent": 4000})
    fast = make_run("accuracy", [*CURVE[:-1], 0.953], final={"consensus": 0.25, "bytes_sent": 8000})
    medium = make_run("accuracy", CURVE, interval=2.0)
    assert sentence(allreduce=slow, gossip=fast, overlap=medium) == (
        "gossip was the fastest to 95% accuracy: 4 s of simulated time, 3 times as fast as allreduce (12.0 s), at the "
        "price of 0.4 percentage points of final accuracy, 2 times the bytes and models that end 0.25 apart (consensus "
        "distance; allreduce: 0)."
    )
    # Where the first run is the fastest, it is compared with the next.
    assert "2 times as fast as overlap (8 s)" in sentence(gossip=fast, overlap=medium, allreduce=slow)


def test_a_better_run_has_no_price():
    slow = make_run("accuracy", CURVE, interval=2.0, final={"consensus": 0.2})
    fast = make_run("accuracy", CURVE, final={"consensus": 0.1, "accuracy": 0.96})
    assert sentence(a=slow, b=fast).endswith("at no price in quality, bytes or consensus distance.")


def test_equally_fast_runs():
    runs = {"a": make_run("accuracy", CURVE, final={"bytes_sent": 8000}), "b": make_run("accuracy", CURVE)}
    assert sentence(**runs) == (
        "a and b were equally fast to 95% accuracy: 4 s of simulated time, a at the price of 2 times the bytes."
    )
    slow = make_run("accuracy", CURVE, interval=2.0)
    assert sentence(c=slow, **runs).startswith(
        "a was the fastest to 95% accuracy: 4 s of simulated time, 2 times as fast as c (8 s)"
    )


def test_the_default_target_is_the_hardest_that_all_runs_reach():
    targets = find_targets([make_run("accuracy", CURVE), make_run("accuracy", [0.1, 0.5, 0.87], interval=2.0)])
    choices = targets.document()["choices"]
    assert choices[targets.default]["text"] == "85%"
    assert choices[targets.default]["cells"] == ["3 s", "4 s"]
    assert choices[-1] == {"target": 0.95, "text": "95%", "cells": ["4 s", "–"]}
    # Both had 10% at the start.
    assert choices[0]["text"] == "15%"
    assert find_targets([make_run("accuracy", [0.1, 0.9915])]).document()["choices"][-1]["text"] == "99.1%"


def test_tasks_without_accuracy_are_compared_by_their_loss():
    slow = make_run("loss", [50.0, 40.0, 30.9], interval=3.0, task="quadratic")
    fast = make_run("loss", [50.0, 35.0, 30.8], task="quadratic", final={"loss": 40.0})
    text = sentence(allreduce=slow, gossip=fast)
    assert text.startswith("gossip was the fastest to a loss of 31: 2 s of simulated time, 3 times as fast as")
    assert "at the price of a final loss of 40 instead of 30.9" in text


def test_averaging_without_gradients_is_compared_by_the_consensus_distance():
    options = {"time_unit": "gradients", "task": "consensus"}
    gossip = make_run("consensus", [8.0, 4.0, 2.0, 1.56], interval=2.0, **options)
    a2cid2 = make_run("consensus", [8.0, 4.0, 1.4, 1.09], interval=2.0, **options)
    assert sentence(gossip=gossip, a2cid2=a2cid2) == (
        "a2cid2 was the fastest to a consensus distance of 1.6: 4 gradients per worker, 1.5 times as fast as gossip "
        "(6), at no price in quality, bytes or consensus distance."
    )
    exact = make_run("consensus", [8.0, 0.0, 0.0], **options)
    assert "consensus distance of 1.6: 1 gradient per worker" in sentence(gossip=gossip, allreduce=exact)


def test_real_workers_are_compared_by_their_own_models():
    """Their averaged model is evaluated at the end only."""
    runs = {
        name: make_run("worker_accuracy", CURVE, interval=interval, world="process", final={"accuracy": 0.96})
        for name, interval in (("allreduce", 2.0), ("gossip", 1.0))
    }
    assert sentence(**runs).startswith(
        "gossip was the fastest to 95% mean accuracy of the workers' own models: 4 s, 2 times as fast as allreduce"
    )


@pytest.mark.parametrize(
    ("final", "expected"),
    [
        ({"diverged": {"time": 1.0, "worker": 3, "step": 5}}, "; gossip diverged."),
        ({"failed": "nobody is left"}, "; gossip failed."),
    ],
)
def test_runs_that_did_not_reach_the_target_are_named(final, expected):
    runs = {
        "allreduce": make_run("accuracy", CURVE, interval=2.0),
        "overlap": make_run("accuracy", CURVE),
        "gossip": make_run("accuracy", [0.1, 0.12], final=final),
    }
    text = sentence(**runs)
    assert text.startswith("overlap was the fastest to 95% accuracy")
    assert text.endswith(expected)


def test_a_target_that_only_one_run_reached():
    runs = {"a": make_run("accuracy", CURVE), "b": make_run("accuracy", [0.1, 0.12, 0.12])}
    assert sentence(**runs) == "Only a reached 95% accuracy, after 4 s of simulated time; b did not reach it."


def test_runs_that_are_still_going():
    done = make_run("accuracy", CURVE)
    going = make_run("accuracy", [0.1, 0.5], interval=2.0, finished=False)
    assert sentence(a=done, b=going) == (
        "So far, only a reached 95% accuracy, after 4 s of simulated time; b still on the way."
    )
    assert sentence(b=going) == "b is at step 1 of 8 after 2 s of simulated time, with 50% accuracy."


def test_one_run():
    run = make_run("accuracy", CURVE, final={"consensus": 0.2})
    assert sentence(gossip=run) == (
        "gossip reached 95.7% accuracy after 4 s of simulated time; its 4 workers were busy 50% of the time, sent 4 kB "
        "and ended 0.2 apart (consensus distance)."
    )
    real = make_run("worker_accuracy", CURVE, world="process", final={"accuracy": 0.97})
    assert sentence(gossip=real).startswith("gossip reached 97% accuracy after 4 s; its 4 workers were busy")


def test_one_run_that_went_wrong():
    diverged = make_run("accuracy", CURVE, final={"diverged": {"time": 1.0, "worker": 3, "step": 5}})
    assert sentence(gossip=diverged) == (
        "gossip diverged after 4 s of simulated time: the loss of worker 3 was not finite at its step 5."
    )
    stopped = make_run("accuracy", CURVE, final={"interrupted": True}, world="process")
    assert sentence(gossip=stopped) == "gossip was stopped by hand at step 4 of 8 after 4 s, with 95.7% accuracy."
    failed = make_run("accuracy", CURVE, final={"failed": "all workers are dead"}, world="process")
    assert sentence(gossip=failed) == "gossip failed after 4 s: all workers are dead."


def test_runs_that_cannot_be_compared():
    run = make_run("accuracy", CURVE)
    other_task = make_run("loss", [2.0, 1.0], task="quadratic")
    expected = "These are 2 runs of different tasks or clocks: their times cannot be compared."
    assert sentence(a=run, b=other_task) == expected
    assert expected == sentence(a=run, b=make_run("accuracy", CURVE, time_unit="gradients"))
    started = StoredRun(Path("run"), {}, {"task": "digits"}, [], None, None, [])
    assert sentence(a=started) == "a has started and has no measurements yet."
    assert sentence(a=started, b=started) == "These are 2 runs that have not reached a common target."
    diverged = make_run("accuracy", CURVE[:1], final={"diverged": {"time": 0.0, "worker": 0, "step": 1}})
    assert sentence(a=diverged, b=started) == ("These are 2 runs that have not reached a common target; a diverged.")
    assert sentence(a=diverged, b=diverged).endswith("a common target; a and b diverged.")
