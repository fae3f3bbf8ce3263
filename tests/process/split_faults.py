"""Links that are cut so that workers that average together would use different stores, or have lost theirs.

A part of the fault suite (``repeat_faults``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import partition_script
import pytest
from partition_faults import LIMIT_S, finished, steps_more
from real_workers import RealWorkers, Report

from hosts import Hosts, Unavailable

LONGEST_S = 5.0
"""The longest step of a worker whose method waits for others."""


@contextmanager
def separated(count: int, method: str, enough: Path, **order: object) -> Iterator[tuple[Hosts, RealWorkers]]:
    """Workers with a host each. Rank 0 hosts the store."""
    try:
        with Hosts(count) as hosts:
            spaces = [hosts.name(host) for host in range(count)]
            environment = {"MASTER_ADDR": hosts.address(0)}
            order = {"steps": 1_000_000, "until": enough, "compute_s": 0.02, **order}
            with RealWorkers(
                count, script=partition_script.train, environment=environment, method=method, spaces=spaces, **order
            ) as workers:
                for worker in workers:
                    worker.at("joined", LIMIT_S)
                    worker.step(50)
                yield hosts, workers
    except Unavailable as why:
        pytest.skip(str(why))


def cut(hosts: Hosts, links: list[tuple[int, int]]) -> None:
    for link in links:
        hosts.cut(*link)


def heal(hosts: Hosts, links: list[tuple[int, int]]) -> None:
    for link in links:
        hosts.heal(*link)


def check(ends: list[Report], longest_s: list[float]) -> None:
    assert max(longest_s) < LONGEST_S, longest_s
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert all(end["missing"] == [] and end["accuracy"] > 0.95 for end in ends)


@pytest.mark.parametrize("method", ["allreduce", "overlap"])
@pytest.mark.parametrize("count", [4, 6])
def test_both_halves_go_on_within_seconds(count: int, method: str, tmp_path: Path) -> None:
    """One half has neither the home store nor the first of the spare ones."""
    ranks = tuple(range(count))
    links = list(product(ranks[: count // 2], ranks[count // 2 :]))
    with separated(count, method, tmp_path / "enough") as (hosts, workers):
        cut(hosts, links)
        for one, other in links:
            workers[one].said(f"worker {other} died or cannot be reached")
            workers[other].said(f"worker {one} died or cannot be reached")
        steps_more(workers, ranks, 50)
        longest_s = [worker.reports[-1]["longest"] for worker in workers]
        heal(hosts, links)
        for one, other in links:
            workers[one].said(f"worker {other} is back")
            workers[other].said(f"worker {one} is back")
        steps_more(workers, ranks, 50)
        (tmp_path / "enough").touch()
        ends = finished(workers)
    print(f"{method}, {count} workers: longest steps {longest_s}")
    check(ends, longest_s)


@pytest.mark.parametrize("method", ["allreduce", "overlap"])
def test_members_of_a_group_that_reach_different_stores_go_on(method: str, tmp_path: Path) -> None:
    """Workers 1, 2 and 3 are a group. Worker 1 reaches the home store, which the others do not."""
    ranks, links = (0, 1, 2, 3), [(0, 2), (0, 3)]
    with separated(4, method, tmp_path / "enough") as (hosts, workers):
        cut(hosts, links)
        for worker in workers:
            worker.said("workers 1, 2, 3 and worker 0 train separately")
        steps_more(workers, ranks, 100)
        # What is built once the workers use their stores has to be built too.
        steps_more(workers, ranks, 100)
        longest_s = [worker.reports[-1]["longest"] for worker in workers]
        (tmp_path / "enough").touch()
        ends = finished(workers)
    print(f"{method}: longest steps {longest_s}")
    assert max(longest_s) < LONGEST_S
    assert [end["missing"] for end in ends] == [[1, 2, 3], [0], [0], [0]]
    assert ends[1]["weights"] == ends[2]["weights"] == ends[3]["weights"]
