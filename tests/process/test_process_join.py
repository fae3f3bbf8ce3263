"""What workers compare when they join: the rows are mistakes that were once accepted in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import join_script
import pytest
from real_workers import RealWorker, RealWorkers, Report

WITHIN_S = 60.0
"""Generous: what counts is that workers end at all. They took less than 3 s on an idle machine."""


def refusals(order: dict[str, Any], count: int = 2) -> list[str]:
    """What the workers say, all of whom have to refuse."""
    with RealWorkers(count, script=join_script.run, **order) as workers:
        reports = [worker.at("refused", WITHIN_S) for worker in workers]
        for worker in workers:
            worker.process.join(WITHIN_S)
            assert worker.process.exitcode == 0
    assert all(report["after_s"] < WITHIN_S for report in reports[-1:])
    return [report["why"] for report in reports]


def stranger(workers: RealWorkers, rank: int, **own: Any) -> RealWorker:
    """One more process, which comes to a run."""
    return RealWorker(rank, workers.environment, join_script.run, {**workers.order, "ranks": {rank: own}})


@pytest.mark.parametrize(
    ("common", "odd", "line"),
    [
        (
            {"method": "a2cid2"},
            {"method": "lasgd"},
            "workers differ in method: a2cid2 on ranks 0, 2; lasgd on rank 1: start all of them with the same",
        ),
        (
            {"method": "allreduce"},
            {"width": 9},
            "workers differ in parameter 0.weight: 8x6 float32 on ranks 0, 2; 9x6 float32 on rank 1: "
            "build the same model on all of them, with the same layers frozen; join several models in one order",
        ),
    ],
)
def test_every_worker_raises_the_same_line(common: dict[str, Any], odd: dict[str, Any], line: str) -> None:
    assert refusals({**common, "ranks": {1: odd}}, count=3) == [line] * 3


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        ({"rate": 2.0}, "workers differ in rate: 1.0 on rank 0; 2.0 on rank 1: start all of them with the same"),
        (
            {"out": True},
            "in out and tracker: not given on rank 0; given on rank 1: give them on all of them, or on none",
        ),
        ({"optimizer": "AdamW"}, "in optimizer: SGD on rank 0; AdamW on rank 1: create the same optimizer on all"),
        ({"version": "9.9"}, "on rank 0; 9.9 on rank 1: install the same version on all of them"),
        ({"world": 3}, "in number of workers: 2 on rank 0; 3 on rank 1: start all of them with the same WORLD_SIZE"),
    ],
)
def test_other_differences(odd: dict[str, Any], line: str) -> None:
    for why in refusals({"method": "gossip", "ranks": {1: odd}}):
        assert line in why


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mistake_of_one_worker_ends_all(rank: int) -> None:
    whys = refusals({"method": "gossip", "ranks": {rank: {"swapped": True}}})
    assert whys[1 - rank] == f"worker {rank} cannot join: {whys[rank]}"
    assert "join(model, optimizer)" in whys[rank]


@pytest.mark.parametrize(
    ("rank", "own", "line"),
    [
        (2, {"world": 3}, "worker 2 comes to a run that has begun, and differs in number of workers: 3 here; 2 in the"),
        (
            1,
            {"method": "lasgd"},
            "differs in method: lasgd here; gossip in the run: start it as the others were started",
        ),
        (1, {"version": "9.9"}, "differs in version of gossamer: 9.9 here; 0."),
    ],
)
def test_who_comes_to_a_run_that_has_begun_fails_alone(rank: int, own: Any, line: str, tmp_path: Path) -> None:
    order = {"method": "gossip", "steps": 100_000, "compute_s": 0.01, "until": tmp_path / "enough"}
    with RealWorkers(2, script=join_script.run, **order) as workers:
        for worker in workers:
            worker.at("joined", WITHIN_S)
        comer = stranger(workers, rank, **own)
        try:
            refused = comer.at("refused", WITHIN_S)
        finally:
            comer.end()
        (tmp_path / "enough").touch()
        ends = [worker.at("finished", WITHIN_S) for worker in workers]
    assert line in refused["why"]
    assert ends[0]["weights"] == ends[1]["weights"]
    assert undisturbed(ends)


def undisturbed(ends: list[Report]) -> bool:
    return all(kind not in ("died", "returned", "rebuilt", "alone") for end in ends for kind, _ in end["events"])


@pytest.mark.parametrize(("victim", "dies"), [(0, "_look"), (1, "_look"), (1, "_publish_facts")])
def test_killed_in_the_handshake(victim: int, dies: str) -> None:
    # The last one comes late, so that the victim is seen and then dies.
    order = {"method": "gossip", "ranks": {victim: {"dies": dies}, 2: {"late_s": 3.0}}}
    survivors = [rank for rank in range(3) if rank != victim]
    with RealWorkers(3, script=join_script.run, **order) as workers:
        workers[victim].died()
        if victim == 0:
            # The last worker finds no store: with torchrun, or a restart of rank 0, it would.
            workers.restart(0).at("joined", WITHIN_S)
            survivors = [0, 1, 2]
        ends = [workers[rank].at("finished", WITHIN_S) for rank in survivors]
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    if dies == "_publish_facts":
        assert any(kind == "died" and "before the start" in text for end in ends for kind, text in end["events"])


def test_a_late_worker_is_waited_for_and_said(tmp_path: Path) -> None:
    said = tmp_path / "said"
    order = {"method": "gossip", "say_after_s": 0.5, "ranks": {0: {"waited": said}, 1: {"late": said}}}
    with RealWorkers(2, script=join_script.run, **order) as workers:
        ends = [worker.at("finished", WITHIN_S) for worker in workers]
    assert ("waiting", "waiting for rank 1 of 2 workers to join") in ends[0]["events"]
    assert ends[0]["weights"] == ends[1]["weights"]


def test_workers_that_do_not_come_are_named(tmp_path: Path) -> None:
    ranks = {0: {"timeout": 4.0, "late": tmp_path / "there"}, 1: {"late_s": 100.0}, 2: {"timeout": 60.0}}
    with RealWorkers(3, script=join_script.run, method="gossip", ranks=ranks) as workers:
        workers[2].at("start")
        (tmp_path / "there").touch()
        lines = [workers[rank].at("refused", WITHIN_S)["why"] for rank in (0, 2)]
    expected = (
        "rank 1 of 3 workers did not join within 4 s: "
        "look at their output and start all workers, or give join a longer timeout"
    )
    assert lines == [expected] * 2


@pytest.mark.parametrize("own", [{}, {"unwrapped": True}], ids=["both", "one"])
def test_the_optimizer_inside_accelerates_wrapper_is_joined(own: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    order = {"method": "allreduce", "accelerated": True, "ranks": {0: own}}
    # Where it finds LOCAL_RANK, Accelerate makes a process group of all workers.
    environment = {"LOCAL_RANK": "0"}
    with RealWorkers(2, script=join_script.run, environment=environment, **order) as workers:
        ends = [worker.at("finished", WITHIN_S) for worker in workers]
    assert [end["steps"] for end in ends] == [20, 20]
    assert ends[0]["weights"] == ends[1]["weights"]
    assert undisturbed(ends)


@pytest.mark.parametrize(("method", "steps"), [("gossip", 30), ("allreduce", 30), ("lasgd", 5)])
def test_an_optimizer_that_is_replaced_after_join(method: str, steps: int) -> None:
    with RealWorkers(2, script=join_script.run, method=method, replaced=True, steps=steps) as workers:
        reports = [worker.at("failed", WITHIN_S) for worker in workers]
    for report in reports:
        assert f"changed {min(steps, 10)} times in a row by another SGD, not by step() of the SGD" in report["why"]
        assert "join after the optimizer is created" in report["why"]
        assert report["kept"] in (None, True)
