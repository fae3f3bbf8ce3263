"""Workers that are killed, stopped, poisoned and restarted while the others train."""

import signal
import time

import pytest
from real_workers import RealWorkers

PAIRWISE = ("gossip", "a2cid2")


@pytest.mark.parametrize("method", PAIRWISE)
def test_a_killed_worker_costs_the_others_nothing(method: str) -> None:
    with RealWorkers(4, method=method, steps=300) as workers:
        before = [worker.step(50)["longest"] for worker in workers]
        workers.kill(2)
        ends = workers.finished([0, 1, 3])
        after = [workers[rank].reports[-2] for rank in (0, 1, 3)]
    assert all(report["at"] == "trained" and report["steps"] == 300 for report in after)
    assert max(report["longest"] for report in after) < max(before) + 1.0
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95


@pytest.mark.parametrize("victim", [0, 2])
def test_a_restarted_worker_takes_over_weights_and_exchanges_again(victim: int) -> None:
    with RealWorkers(4, method="a2cid2", steps=900) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(victim)
        back = workers.restart(victim)
        back.at("start", 60)
        began = time.monotonic()
        back.at("joined", 20)
        back.until(lambda report: report.get("exchanges", 0) > 0, 20)
        assert time.monotonic() - began < 5
        ends = workers.finished()
    assert any("took over the weights" in item for item in ends[victim]["news"])
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95


def test_a_stopped_worker_is_passed_over_and_comes_back() -> None:
    with RealWorkers(4, method="gossip", steps=1200) as workers:
        for worker in workers:
            worker.step(50)
        workers[1].signal(signal.SIGSTOP)
        time.sleep(6)
        workers[1].signal(signal.SIGCONT)
        ends = workers.finished()
        trained = [worker.reports[-2] for worker in workers]
    assert max(trained[rank]["longest"] for rank in (0, 2, 3)) < 1.0
    assert all(end["weights"] == ends[0]["weights"] for end in ends)


def test_two_killed_at_once() -> None:
    with RealWorkers(4, method="a2cid2", steps=300) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(0, 3)
        ends = workers.finished([1, 2])
    assert ends[0]["weights"] == ends[1]["weights"]
    assert ends[0]["accuracy"] > 0.95


@pytest.mark.parametrize("method", ["allreduce", "localsgd", "overlap", "lasgd", "divisible"])
def test_survivors_of_a_group_go_on(method: str) -> None:
    with RealWorkers(4, method=method, steps=250) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(2)
        ends = workers.finished([0, 1, 3])
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95


def test_weights_that_are_not_finite_do_not_spread() -> None:
    with RealWorkers(3, method="gossip", topology="complete", steps=200, poison=(1, 60)) as workers:
        ends = workers.finished()
    assert any("our weights were not finite" in item for item in ends[1]["news"])
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95


@pytest.mark.parametrize("method", ["allreduce", "divisible"])
def test_a_stopped_worker_of_a_group_is_passed_over_and_taken_back(method: str) -> None:
    with RealWorkers(3, method=method, steps=400) as workers:
        for worker in workers:
            worker.step(50)
        workers[1].signal(signal.SIGSTOP)
        workers[0].step(100)
        workers[1].signal(signal.SIGCONT)
        ends = workers.finished()
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95


@pytest.mark.parametrize("method", ["allreduce", "localsgd", "overlap", "lasgd", "divisible"])
def test_a_restarted_worker_comes_back_to_its_group(method: str) -> None:
    with RealWorkers(3, method=method, steps=600) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(1)
        workers[0].step(100)
        back = workers.restart(1)
        back.until(lambda report: report.get("exchanges", 0) > 0, 20)
        ends = workers.finished()
    assert any("came back" in item for item in ends[1]["news"])
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95
