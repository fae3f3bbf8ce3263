"""Every effect on real workers: what it answers, and what happens where workers disagree about it."""

import re

import pytest
import torch
from effects_script import run_method
from real_workers import RealWorkers
from torch import nn

import gossamer
from gossamer.process.lifecycle import TrainingEnded


def outcome(effects, workers=3, steps=4, **order):
    with RealWorkers(workers, script=run_method, effects=effects, steps=steps, **order) as job:
        return job.finished()


def failures(effects, workers=3):
    with RealWorkers(workers, script=run_method, effects=effects, steps=100_000) as job:
        return [worker.at("failed") for worker in job]


@pytest.mark.parametrize("workers", [2, 3])
def test_means_are_weighted_and_scalars_travel_along(workers):
    total = sum(range(workers))
    mean = sum(rank * (rank + 1) for rank in range(workers)) / total
    scalar = sum(10.0 * rank * rank for rank in range(workers)) / total
    for report in outcome("WeightedMeans", workers):
        assert len(report["seen"]) == 4
        for vector, scalars in report["seen"]:
            assert vector == pytest.approx([mean] * 5)
            assert scalars == pytest.approx((scalar, 1.0))


def test_topics_are_matched_whatever_their_order():
    for report in outcome("TopicsInAnyOrder", workers=4):
        assert len(report["seen"]) == 8
        for topic, mean in report["seen"]:
            assert mean == ([1.5] * 3 if topic == "one" else [15.0] * 4)


def test_groups_gather_among_themselves():
    for rank, report in enumerate(outcome("GathersInGroups", workers=4, steps=3)):
        group = (0, 1) if rank < 2 else (2, 3)
        assert report["seen"] == [[[[float(r)], [r, step]] for r in group] for step in range(3)]


def test_shifts_go_round_a_ring():
    for rank, report in enumerate(outcome("ShiftsAlongARing", workers=3)):
        source = (rank - 1) % 3
        assert report["seen"] == [([10.0 * step + source] * 4, (0.5 + source,), True) for step in range(4)]
        assert report["bytes"] == 4 * (16 + 8)


def test_a_shift_to_a_worker_that_is_gone_is_not_delivered():
    with RealWorkers(3, script=run_method, effects="ShiftsAlongARing", steps=30, dies=(2, 10)) as job:
        before, after = job.finished([0, 1])
    # Worker 1 sent to worker 2, worker 0 received from it. The one that took over the other's step at the death is a
    # step ahead in its own loop, and alone in its last one.
    assert (None, (), True) in before["seen"][-2:]
    assert ((0.5,), False) in [shifted[1:] for shifted in after["seen"][-2:]]


def test_swaps_carry_anything_and_may_be_started(tmp_path):
    order = {"steps": 100_000, "until": tmp_path / "enough"}
    with RealWorkers(2, script=run_method, effects="StartsSwaps", **order) as job:
        for worker in job:
            worker.until(lambda report: report["at"] == "step" and report["seen"] > 4)
        (tmp_path / "enough").touch()
        reports = job.finished()
    for rank, report in enumerate(reports):
        begun, *exchanges = report["seen"]
        assert begun == ("begin", [0.0] * 7)
        assert len(exchanges) > 3
        assert all(exchange == (1 - rank, [1.0 - rank] * 3, (2.5 * (1 - rank),)) for exchange in exchanges)


def test_a_worker_that_comes_back_takes_over_the_model_and_what_is_shared_whatever_swaps_carry(tmp_path):
    order = {"steps": 100_000, "until": tmp_path / "enough"}
    with RealWorkers(3, script=run_method, effects="StartsSwaps", **order) as job:
        job[0].step(20)
        job.kill(2)
        joined = job.restart(2).at("joined")
        # ``begin`` runs once the state is there: the shared vector has the others' content.
        assert joined["seen"] == [("begin", [7.0] * 7)]
        (tmp_path / "enough").touch()
        reports = job.finished()
    assert reports[0]["weights"] == reports[1]["weights"] == reports[2]["weights"]


def test_means_in_both_parts_survive_a_death():
    with RealWorkers(3, script=run_method, effects="MeansInBothParts", steps=60, dies=(1, 20)) as job:
        reports = job.finished([0, 2])
    assert reports[0]["weights"] == reports[1]["weights"]
    for report in reports:
        assert [1.0, 1.0] in report["seen"]
        assert report["seen"][0] == [1.0, 1.0]
        assert len(report["seen"]) > 15


def test_the_optimizers_state_is_read_and_written_by_name():
    (report,) = outcome("OptimizerState", workers=1)
    # Zeroed after every step, the momentum is the newest gradient.
    assert report["seen"] == [((0, 6, 8), 0.0)] * 4


@pytest.mark.parametrize(
    ("effects", "sides"),
    [
        ("OtherTopics", ["Mean 'topic 0' round 0", "Mean 'topic 1' round 0"]),
        ("OtherRounds", ["Mean 'same' round 100", "Mean 'same' round 101"]),
        ("OtherGroups", ["of workers 0, 1 ", "of workers 0, 1, 2 "]),
        ("OtherLengths", ["3 float32", "4 float32"]),
        ("OtherSwaps", ["a Swap of 3 numbers", "a Swap of 4 numbers"]),
    ],
)
def test_a_mismatch_is_an_error_on_both_sides_that_names_both(effects, sides):
    reports = failures(effects, workers=2 if effects == "OtherSwaps" else 3)
    for report in reports[:2]:
        assert report["kind"] == "MethodError"
        assert re.match(r"worker \d is in .*, worker \d in .*: expected the same collective", report["why"])
        assert all(side in report["why"] for side in sides)


def test_an_error_of_the_background_reaches_the_training():
    for report in failures("FailsInTheBackground", workers=2):
        assert report["kind"] == "ZeroDivisionError"


def test_an_error_of_the_background_at_the_end_is_raised_by_finish(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    swarm = gossamer.join(model, optimizer, method="lasgd")
    driver = swarm._runtime.driver
    answer = driver.effects.answer

    def fail_at_the_end(*arguments, **named):
        try:
            return answer(*arguments, **named)
        except TrainingEnded:
            raise ZeroDivisionError("in the background") from None

    monkeypatch.setattr(driver.effects, "answer", fail_at_the_end)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ZeroDivisionError):
        swarm.finish()
    # While it serves others, not when they have ended.
    with pytest.raises(ZeroDivisionError):
        driver.serve(lambda: False)
    swarm.close()


def test_an_undeclared_effect_is_refused_at_the_first_step():
    for report in failures("Undeclared", workers=2):
        assert report["why"].startswith("step of method one-effect yielded Mean, which it does not declare")
