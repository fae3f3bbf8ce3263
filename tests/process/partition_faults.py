"""Workers that cannot reach each other for a while: both sides train on and are averaged, or the smaller one waits.

A part of the fault suite (``repeat_faults``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import partition_script
import pytest
from fault_checks import once
from real_workers import RealWorker, RealWorkers, Report

from hosts import Hosts, Unavailable

LIMIT_S = 120.0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        with Hosts(3) as made:
            yield made
    except Unavailable as why:
        pytest.skip(str(why))


def workers_on(hosts: Hosts, tmp_path: Path, method: str, **order: object) -> RealWorkers:
    environment = {"MASTER_ADDR": hosts.address(0)}
    order.setdefault("steps", 1_000_000)
    order.setdefault("until", tmp_path / "enough")
    # Workers 3 and 4 come later.
    spaces = [hosts.name(host) for host in (0, 1, 2, 1, 2)]
    return RealWorkers(3, script=partition_script.train, environment=environment, method=method, spaces=spaces, **order)


def steps_more(workers: RealWorkers, ranks: tuple[int, ...], number: int) -> None:
    """Wait until each of these has made that many more steps."""
    for rank in ranks:
        worker = workers[rank]
        while worker.waiting():
            worker.next()
        reached = worker.until(lambda report: report["at"] == "step", LIMIT_S)["step"]
        worker.until(lambda report: report["at"] == "step" and report["step"] >= reached + number, LIMIT_S)  # noqa: B023


def until_silent(worker: RealWorker, silence_s: float = 20.0) -> None:
    """Wait until a worker makes no more steps: not since it waits in a collective, but since it has noticed."""
    until = time.monotonic() + LIMIT_S
    while worker.waiting(silence_s):
        assert time.monotonic() < until
        worker.next()


def finished(workers: RealWorkers) -> list[Report]:
    return [worker.at("finished", LIMIT_S) for worker in workers]


@pytest.mark.parametrize("method", ["allreduce", "overlap"])
def test_both_sides_of_a_partition_are_averaged(hosts: Hosts, tmp_path: Path, method: str) -> None:
    with workers_on(hosts, tmp_path, method) as workers:
        for worker in workers:
            worker.at("joined", LIMIT_S)
            worker.step(20)
        hosts.isolate(2)
        # The one that is cut off, and the others, each train on.
        steps_more(workers, (2, 0, 1), 40)
        hosts.reconnect(2)
        for worker in workers:
            worker.until(lambda report: any("trained separately" in e for e in report.get("events", ())), LIMIT_S)
        steps_more(workers, (0, 1, 2), 20)
        (tmp_path / "enough").touch()
        ends = finished(workers)
    assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"]
    assert all(end["missing"] == [] and end["accuracy"] > 0.95 for end in ends)
    for end in ends:
        (merged,) = [event for event in end["events"] if "trained separately" in event]
        assert "worker 2" in merged
        # One of the two may have been a step behind the other.
        assert re.search(r"of workers? (0|1|0, 1),", merged)


def num_rebuilt(report: Report) -> int:
    return sum("the group was rebuilt" in event for event in report.get("events", ()))


@once
def test_all_go_on_while_two_cannot_reach_each_other_for_a_long_while(hosts: Hosts, tmp_path: Path) -> None:
    check_all_go_on(hosts, tmp_path, "allreduce", (1, 2), seconds=95)


@pytest.mark.parametrize("cut", [(1, 2), (0, 1)])
@pytest.mark.parametrize("method", ["allreduce", "overlap", "lasgd"])
def test_all_go_on_while_two_cannot_reach_each_other(
    hosts: Hosts, tmp_path: Path, method: str, cut: tuple[int, int]
) -> None:
    """Both reach the third. Rank 0 hosts the store."""
    check_all_go_on(hosts, tmp_path, method, cut, seconds=0)


def check_all_go_on(hosts: Hosts, tmp_path: Path, method: str, cut: tuple[int, int], seconds: float) -> None:
    with workers_on(hosts, tmp_path, method, compute_s=0.02) as workers:
        for worker in workers:
            worker.at("joined", LIMIT_S)
            worker.step(50)
        hosts.cut(*cut)
        for worker in workers:
            worker.until(lambda report: any("cannot reach each other" in e for e in report.get("events", ())), LIMIT_S)
        until = time.monotonic() + seconds
        steps_more(workers, (0, 1, 2), 100)
        while time.monotonic() < until:
            steps_more(workers, (0, 1, 2), 10)
        rebuilt = [num_rebuilt(worker.reports[-1]) for worker in workers]
        hosts.heal(*cut)
        for worker, number in zip(workers, rebuilt, strict=True):
            worker.until(lambda report: num_rebuilt(report) > number, LIMIT_S)  # noqa: B023
        steps_more(workers, (0, 1, 2), 50)
        (tmp_path / "enough").touch()
        ends = finished(workers)
        longest = [worker.reports[-2]["longest"] for worker in workers]
    print(f"{method}, cut {cut}: longest steps {longest}")
    assert max(longest) < 5.0
    assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"]
    assert all(end["missing"] == [] and end["accuracy"] > 0.95 for end in ends)
    one, other = cut
    third = 3 - one - other
    together = ", ".join(str(rank) for rank in sorted((one, third)))
    cut_off = f"workers {one} and {other} cannot reach each other"
    text = f"{cut_off}: until they can, workers {together} and worker {other} train separately"
    for end in ends:
        assert text in end["events"]


@pytest.mark.parametrize("method", ["allreduce", "a2cid2"])
def test_the_end_in_a_partition_is_said(hosts: Hosts, tmp_path: Path, method: str) -> None:
    with workers_on(hosts, tmp_path, method) as workers:
        for worker in workers:
            worker.at("joined", LIMIT_S)
            worker.step(20)
        hosts.isolate(2)
        (tmp_path / "enough").touch()
        ends = finished(workers)
    assert [end["missing"] for end in ends] == [[2], [2], [0, 1]]
    for end in ends:
        assert any("the final model is without" in event for event in end["events"]), end["events"]


@pytest.mark.parametrize("method", ["allreduce", "a2cid2"])
def test_the_smaller_side_waits(hosts: Hosts, tmp_path: Path, method: str) -> None:
    with workers_on(hosts, tmp_path, method, settings={"partition": "majority"}, compute_s=0.05) as workers:
        for worker in workers:
            worker.at("joined", LIMIT_S)
            worker.step(20)
        hosts.isolate(2)
        until_silent(workers[2])
        steps_more(workers, (0, 1), 40)
        assert not workers[2].waiting()
        hosts.reconnect(2)
        steps_more(workers, (0, 1, 2), 20)
        (tmp_path / "enough").touch()
        ends = finished(workers)
    assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"]
    assert any("training pauses" in event for event in ends[2]["events"])
    assert any("training goes on" in event for event in ends[2]["events"])
    assert not any("training pauses" in event for end in ends[:2] for event in end["events"])


@pytest.mark.parametrize("method", ["a2cid2", "allreduce"])
def test_of_two_workers_that_were_given_one_rank_on_both_sides_one_ends(
    hosts: Hosts, tmp_path: Path, method: str
) -> None:
    with workers_on(hosts, tmp_path, method) as workers:
        for worker in workers:
            worker.at("joined", LIMIT_S)
        address = workers[2].reports[-1]["address"]
        steps_more(workers, (0, 1, 2), 20)
        hosts.isolate(2)
        for rank, other in ((0, 2), (1, 2), (2, 0), (2, 1)):
            workers[rank].said(f"worker {other} died")
        keeps, ends = workers.grow(1)[0], workers.grow(1, at=address)[0]
        assert [worker.at("joined", LIMIT_S)["rank"] for worker in (keeps, ends)] == [3, 3]
        steps_more(workers, (0, 1, 2, 3, 4), 20)
        hosts.reconnect(2)
        assert "rank 3 was given to two processes while the network was cut" in ends.at("ended", LIMIT_S)["why"]
        ends.process.join(60)
        for rank in (0, 1):
            workers[rank].until(lambda report: "worker 2 is back" in report.get("events", ()), LIMIT_S)
        steps_more(workers, (0, 1, 2, 3), 20)
        (tmp_path / "enough").touch()
        reports = [workers[rank].at("finished", LIMIT_S) for rank in range(4)]
    assert all(report["weights"] == reports[0]["weights"] for report in reports)
    assert [report["missing"] for report in reports] == [[]] * 4
