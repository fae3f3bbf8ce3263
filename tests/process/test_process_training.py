"""Real processes that train together."""

import pytest
from real_workers import RealWorkers

from gossamer.methods import METHODS


@pytest.mark.parametrize(("method", "count"), [("overlap", 3), ("a2cid2", 1), ("allreduce", 1)])
def test_they_end_with_one_good_model(method: str, count: int) -> None:
    with RealWorkers(count, method=method, steps=150, compute_s=0.0, other_start=True) as workers:
        ends = workers.finished()
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.95


@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_with_one_good_model_also_with_uneven_numbers_of_batches(method: str) -> None:
    # Five are fewer than divisible's dense steps at the start.
    with RealWorkers(3, method=method, steps=[100, 5, 100], compute_s=0.005, other_start=True) as workers:
        ends = workers.finished()
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
    assert ends[0]["accuracy"] > 0.9


@pytest.mark.parametrize(("method", "steps"), [("overlap", 40), ("a2cid2", [40, 10, 40])])
def test_the_mean_model_can_be_looked_at_before_the_end(method: str, steps: int | list[int]) -> None:
    with RealWorkers(3, method=method, steps=steps, averaged=True) as workers:
        ends = workers.finished()
        means = [report["weights"] for worker in workers for report in worker.reports if report["at"] == "averaged"]
    assert len(means) == 3
    assert means[0] == means[2]
    assert all(end["weights"] == ends[0]["weights"] for end in ends)
