"""Replicas: workers of several ranks with DDP, FSDP2 or tensor parallel inside."""

import pytest
import torch
from real_workers import RealWorkers
from replica_script import run

METHODS = {
    "allreduce": {},
    "localsgd": {"period": 3},
    "diloco": {"period": 4, "delay": 2, "fragments": 2},
    "overlap": {},
    "sgp": {},
}


def trained(shape, **order):
    """What each rank reports in the end."""
    with RealWorkers(shape[0] * shape[1], script=run, shape=shape, **order) as ranks:
        return ranks.finished()


def weights(report):
    return torch.cat([torch.tensor(values).flatten() for values in report["weights"]])


@pytest.fixture(scope="module")
def plain():
    """The weights of replicas of one rank, by method."""
    found = {}

    def train(method):
        if method not in found:
            order = {"kind": "ddp", "method": method, "settings": METHODS[method]}
            found[method] = [weights(report) for report in trained((2, 1), **order)]
        return found[method]

    return train


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "method"),
    [("fsdp", method) for method in METHODS] + [("ddp", "diloco"), ("tp", "allreduce"), ("tp", "diloco")],
)
def test_replicas_of_two_ranks_end_as_replicas_of_one(kind, method, plain):
    reports = trained((2, 2), kind=kind, method=method, settings=METHODS[method], other_start=True)
    for report in reports:
        assert torch.allclose(weights(report), weights(reports[0]), atol=0)
        assert torch.allclose(weights(report), plain(method)[0], atol=1e-6)
        assert report["same"] or method in ("overlap", "sgp", "diloco")
        assert report["mean"] == 1.5
        assert report["torn"] == 0
    assert [report["shard"] for report in reports] == [[0, 2], [1, 2], [0, 2], [1, 2]]
