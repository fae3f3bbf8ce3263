"""Workers whose weights are not finite, or absurdly large.

A part of the fault suite (``repeat_faults``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_checks import EVERY, PAIRWISE, good
from real_workers import RealWorkers


@pytest.mark.parametrize("method", EVERY)
def test_what_is_not_finite_does_not_spread(method: str, tmp_path: Path) -> None:
    order = {"method": method, "topology": "complete", "momentum": 0.5, "poison": (1, 60, float("nan"))}
    with RealWorkers(4, steps=100_000, until=tmp_path / "enough", **order) as workers:
        told = workers[1].said("our weights were not finite")
        workers[1].step(told["step"] + 50)
        (tmp_path / "enough").touch()
        ends = workers.finished()
        trained = [worker.reports[-2] for worker in workers]
    assert sum(report["refused"] for report in trained) > 0
    good(ends)


@pytest.mark.parametrize("method", PAIRWISE)
def test_what_is_absurdly_large_does_not_spread(method: str, tmp_path: Path) -> None:
    order = {"method": method, "topology": "complete", "poison": (1, 60, 1e12)}
    with RealWorkers(4, steps=100_000, until=tmp_path / "enough", **order) as workers:
        told = workers[1].said("absurdly large: took over")
        workers[1].step(told["step"] + 50)
        (tmp_path / "enough").touch()
        ends = workers.finished()
        trained = [worker.reports[-2] for worker in workers]
    assert sum(report["refused"] for report in trained) > 0
    good(ends)


def test_an_absurd_worker_does_not_count_in_the_end() -> None:
    # It has one neighbour only, who cannot outvote it, and makes its absurd step shortly before the end.
    order = {"method": "gossip", "topology": "path", "momentum": 0.5, "poison": (0, 195, 1e12)}
    with RealWorkers(3, steps=200, **order) as workers:
        good(workers.finished())
