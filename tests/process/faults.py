"""Workers that are killed and restarted, come and leave, and cannot reach each other, while the others train.

The main part of the fault suite (``repeat_faults``). Each of these ends the same way: every survivor's process ends by
itself and well, with no thread of ours left; all hold the same weights; and the model is good.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from fault_checks import (
    EVERY,
    LONG,
    NOT_WAITING,
    PAIRWISE,
    WAITING,
    bound_s,
    good,
    newest_steps,
    once,
    spread,
    victim_of,
)
from real_workers import RealWorkers
from training_script import train

from hosts import Hosts, Unavailable, enter

# Killed


@pytest.mark.parametrize("method", NOT_WAITING)
def test_killed_in_the_middle_of_an_exchange(method: str, run: int) -> None:
    victim = victim_of(method, run)
    survivors = [rank for rank in range(4) if rank != victim]
    with RealWorkers(4, method=method, steps=100, dies=(victim, 50), **LONG) as workers:
        workers[victim].died()
        ends = workers.finished(survivors)
        trained = [workers[rank].reports[-2] for rank in survivors]
    assert all(report["at"] == "trained" and report["steps"] == 100 for report in trained)
    # The deadline of the first exchanges is a minute. Nobody's steps wait for it.
    assert max(report["longest"] for report in trained) < 30
    good(ends)


@pytest.mark.parametrize("method", WAITING)
def test_killed_in_the_middle_of_an_average(method: str, run: int) -> None:
    victim = victim_of(method, run)
    survivors = [rank for rank in range(4) if rank != victim]
    with RealWorkers(4, method=method, steps=60, dies=(victim, 30), **LONG) as workers:
        workers[victim].died()
        ends = workers.finished(survivors)
        trained = [workers[rank].reports[-2] for rank in survivors]
    assert all(report["at"] == "trained" and report["steps"] >= 58 for report in trained)
    if method in ("allreduce", "overlap"):
        # Some have completed the average in which it died, and others have not.
        assert all(end["repeated"] <= 1 and end["dropped"] == 0 for end in ends)
    # That of a collective is a minute or more, unless somebody is found dead.
    assert max(report["longest"] for report in trained) < 30
    good(ends)


@pytest.mark.parametrize(("method", "victims"), [("a2cid2", (0, 3)), ("gossip", (1, 2)), ("allreduce", (0, 2))])
def test_two_killed_at_once(method: str, victims: tuple[int, int]) -> None:
    with RealWorkers(4, method=method, steps=120) as workers:
        for worker in workers:
            worker.step(20)
        workers.kill(*victims)
        good(workers.finished([rank for rank in range(4) if rank not in victims]))


@pytest.mark.parametrize("method", [name for name in EVERY if name not in PAIRWISE])
def test_a_worker_dies_after_it_said_that_it_is_there(method: str, run: int) -> None:
    """The members of a new generation are agreed on while one that would be its lowest rank dies, and one is done."""
    pause_s = 0.1 + 0.35 * spread(method, run)
    with RealWorkers(4, method=method, steps=(40, 120, 120, 120)) as workers:
        workers[0].at("trained")
        workers[2].step(60)
        workers.kill(3)
        time.sleep(pause_s)
        workers.kill(1)
        good(workers.finished([0, 2]))


def test_killed_one_after_the_other() -> None:
    with RealWorkers(4, method="allreduce", steps=250) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(1)
        time.sleep(0.3)
        workers.kill(2)
        time.sleep(0.3)
        workers.kill(0)
        good(workers.finished([3]))


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_killed_while_they_meet(method: str) -> None:
    with RealWorkers(4, method=method, steps=150) as workers:
        workers[2].at("start")
        time.sleep(0.15)
        workers.kill(2)
        workers.restart(2)
        good(workers.finished())


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("method", ["gossip", "overlap", "divisible"])
def test_killed_while_they_take_the_last_mean(method: str, victim: int) -> None:
    with RealWorkers(4, method=method, steps=40, dies=(victim, 40), **LONG) as workers:
        workers[victim].died()
        good(workers.finished([rank for rank in range(4) if rank != victim]))


# Restarted


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("method", EVERY)
def test_a_restarted_worker_is_back_in_the_exchange(method: str, victim: int, tmp_path: Path) -> None:
    with RealWorkers(4, method=method, steps=100_000, until=tmp_path / "enough") as workers:
        for worker in workers:
            worker.step(20)
        workers.kill(victim)
        survivors = [rank for rank in range(4) if rank != victim]
        died = [workers[rank].step(60) for rank in survivors]
        workers.restart(victim).exchanged()
        steps = newest_steps(workers, survivors)
        came_back = [workers[rank].step(step + 20) for rank, step in zip(survivors, steps, strict=True)]
        (tmp_path / "enough").touch()
        ends = workers.finished()
    assert any("came back" in item for item in ends[victim]["events"])
    if method in ("allreduce", "overlap"):
        # One step for the death, and one for the return.
        assert max(report["repeated"] for report in died) <= 1
        assert max(now["repeated"] - then["repeated"] for now, then in zip(came_back, died, strict=True)) <= 1
        # Made again with the same gradients, also by a worker that was a step behind and took over another's state.
        assert [end["dropped"] for end in ends] == [0, 0, 0, 0]
    good(ends)


@pytest.mark.parametrize("method", ["gossip", "allreduce", "lasgd"])
def test_restarted_at_once_before_anybody_takes_it_for_dead(method: str, tmp_path: Path) -> None:
    with RealWorkers(4, method=method, steps=100_000, until=tmp_path / "enough") as workers:
        for worker in workers:
            worker.step(20)
        workers.kill(2)
        workers.restart(2).exchanged()
        (tmp_path / "enough").touch()
        good(workers.finished())


@pytest.mark.parametrize("method", ["a2cid2", "allreduce"])
def test_every_worker_is_restarted_in_turn(method: str, tmp_path: Path) -> None:
    with RealWorkers(3, method=method, steps=100_000, until=tmp_path / "enough") as workers:
        for worker in workers:
            worker.step(20)
        for victim in (1, 0, 2, 0):
            workers.kill(victim)
            workers.restart(victim).exchanged(2)
        (tmp_path / "enough").touch()
        good(workers.finished())


# More workers, and fewer


@pytest.mark.parametrize("method", EVERY)
def test_four_grow_to_eight_and_shrink_to_three(method: str, tmp_path: Path) -> None:
    """The first to leave hosts the store."""
    order = {"method": method, "until": tmp_path / "enough", "leave": tmp_path, "recent": True, "compute_s": 0.02}
    with RealWorkers(4, steps=100_000, watch=True, **order) as workers:
        for worker in workers:
            worker.step(50)
        for worker in workers.grow(4):
            worker.exchanged(2)
        for worker in workers:
            worker.until(lambda report: any("has 8 workers" in event for event in report.get("events", ())))
        for leaving in (0, 2, 3, 5, 6):
            (tmp_path / f"leave {leaving}").touch()
            workers[leaving].at("left")
            workers[leaving].process.join(60)
            assert workers[leaving].process.exitcode == 0
        stay = [1, 4, 7]
        for rank in stay:
            workers[rank].said("has 3 workers")
            workers[rank].step(workers[rank].reports[-1]["step"] + 50)
        longest = {rank: max(report.get("longest", 0.0) for report in workers[rank].reports[6:]) for rank in stay}
        print(f"{method}: longest steps {longest}")
        (tmp_path / "enough").touch()
        ends = workers.finished(stay)
    assert max(longest.values()) < 2.0
    assert all(end["missing"] == [] for end in ends)
    good(ends)


@pytest.mark.parametrize("method", ["a2cid2", "allreduce", "lasgd"])
def test_the_place_of_a_dead_worker_is_given_up(method: str, tmp_path: Path) -> None:
    order = {"method": method, "until": tmp_path / "enough", "give_up": tmp_path}
    with RealWorkers(4, steps=100_000, **order) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(1)
        workers[0].said("worker 1 died")
        (tmp_path / "give up 0 1").touch()
        for rank in (0, 2, 3):
            workers[rank].said("worker 1 has left for good")
            workers[rank].step(workers[rank].reports[-1]["step"] + 50)
        assert "has left this run for good" in workers.restart(1).at("refused")["why"]
        (tmp_path / "enough").touch()
        ends = workers.finished([0, 2, 3])
    assert all(end["missing"] == [] for end in ends)
    good(ends)


@pytest.mark.parametrize("method", ["a2cid2", "allreduce", "lasgd"])
def test_newcomers_die_while_they_come(method: str, tmp_path: Path) -> None:
    """The others go on; one that comes through any worker's address while the store's host is dead is taken in."""
    # The places of the dead are kept: on a ring they would part the others.
    order = {"method": method, "topology": "complete", "until": tmp_path / "enough", "compute_s": 0.02}
    with RealWorkers(3, steps=100_000, **order) as workers:
        for worker in workers:
            worker.step(50)
        for pause_s in (0.2, 0.5, 1.0):
            (newcomer,) = workers.grow(1)
            newcomer.at("start")
            time.sleep(pause_s)
            newcomer.process.kill()
            newcomer.end()
        address = next(report["address"] for report in workers[2].reports if "address" in report)
        workers.kill(0)
        workers[1].said("worker 0 died")
        (newcomer,) = workers.grow(1, at=address)
        newcomer.exchanged(2)
        (tmp_path / "enough").touch()
        ends = [worker.at("finished") for worker in (workers[1], workers[2], newcomer)]
    good(ends)


# Churn


@pytest.mark.parametrize("method", ["allreduce", "overlap", "lasgd", "a2cid2"])
def test_workers_die_and_come_back_all_the_time(method: str, run: int, tmp_path: Path) -> None:
    """The worker that stays never waits for long, whoever dies when: the host of the store most often of all."""
    rng = random.Random(f"{method} {run}")
    order = {"method": method, "until": tmp_path / "enough", "compute_s": 0.04, "watch": True}
    with RealWorkers(4, steps=1_000_000, **order) as workers:
        for worker in workers:
            worker.step(20)
        for victim in (0, 1, 0, 2, 0, 1, 2, 0):
            workers.kill(victim)
            time.sleep(rng.uniform(0.0, 2.0))
            workers.restart(victim)
            if rng.random() < 0.5:
                workers[victim].until(lambda report: report.get("exchanges", 0) > 2)
            else:
                # It dies, or another does, while it joins.
                time.sleep(rng.uniform(0.0, 1.0))
        for victim in (0, 1, 2):
            workers[victim].until(lambda report: report.get("exchanges", 0) > 2)
        (tmp_path / "enough").touch()
        ends = workers.finished()
        trained = workers[3].reports[-2]
    assert trained["at"] == "trained"
    assert trained["longest"] < bound_s(method)
    good(ends)


# Networks


def train_on_host(rank: int, environment: dict[str, str], order: dict[str, Any], out: Any) -> None:
    enter(order["hosts"][rank])
    train(rank, environment, order, out)


@once
def test_two_cannot_reach_each_other_for_a_long_while(tmp_path: Path) -> None:
    test_two_cannot_reach_each_other_for_a_while("a2cid2", 40, tmp_path)


@pytest.mark.parametrize("seconds", [8, 20])
@pytest.mark.parametrize("method", ["a2cid2", "gossip"])
def test_two_cannot_reach_each_other_for_a_while(method: str, seconds: float, tmp_path: Path) -> None:
    """Both reach rank 0, which hosts the store. Nobody waits, and nobody ends before its time."""
    try:
        hosts = Hosts(3)
    except Unavailable as why:
        pytest.skip(str(why))
    with hosts:
        environment = {"MASTER_ADDR": hosts.address(0)}
        order = {"hosts": [hosts.name(rank) for rank in range(3)], "steps": 100_000, "until": tmp_path / "enough"}
        order |= {"method": method, "topology": "complete", "compute_s": 0.02}
        with RealWorkers(3, script=train_on_host, environment=environment, **order) as workers:
            for worker in workers:
                worker.step(50)
            hosts.cut(1, 2)
            before = newest_steps(workers, [0, 1, 2])
            time.sleep(seconds)
            after = newest_steps(workers, [0, 1, 2])
            hosts.heal(1, 2)
            time.sleep(4)
            (tmp_path / "enough").touch()
            ends = workers.finished()
            trained = [worker.reports[-2] for worker in workers]
    # Reports are ten steps apart, and the machine may be busy.
    assert all(now - then >= 10 * seconds for then, now in zip(before, after, strict=True))
    assert max(report["longest"] for report in trained) < 2.0
    good(ends)
