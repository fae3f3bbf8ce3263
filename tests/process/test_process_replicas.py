"""Replicas: workers of several ranks with DDP, FSDP2 or tensor parallel inside."""

import math

import pytest
import torch
from real_workers import RealWorkers
from replica_script import run

from gossamer.process.store.rank_info import free_port

METHODS = {
    "allreduce": {},
    "localsgd": {"period": 3},
    "diloco": {"period": 4, "delay": 2, "fragments": 2},
    "overlap": {},
    "sgp": {},
}


def trained(shape, **order):
    """What each rank reports in the end."""
    with RealWorkers(math.prod(shape), script=run, shape=shape, **order) as ranks:
        return ranks.finished()


def weights(report, what="weights"):
    return torch.cat([torch.tensor(values).flatten() for values in report[what]])


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


@pytest.mark.parametrize(
    ("kind", "method"),
    [("fsdp", method) for method in METHODS] + [("ddp", "diloco"), ("tp", "diloco"), ("fsdp-tp", "allreduce")],
)
def test_replicas_of_two_ranks_end_as_replicas_of_one(kind, method, plain):
    shape = (2, 1, 2) if kind == "fsdp-tp" else (2, 2)
    reports = trained(shape, kind=kind, method=method, settings=METHODS[method], other_start=True)
    for report in reports:
        assert torch.equal(weights(report), weights(reports[0]))
        assert torch.equal(weights(report, "averaged"), weights(reports[0], "averaged"))
        assert torch.allclose(weights(report), plain(method)[0], atol=1e-6)
        assert report["mean"] == 1.5
        assert report["torn"] == 0
    assert [report["shard"] for report in reports] == [[0, 2], [1, 2], [0, 2], [1, 2]]


WRONG = {
    "is spread over ranks [0, 1, 2, 3], and this replica has ranks [": {"kind": "fsdp-world"},
    "DDP averages over ranks [0, 1, 2, 3], and this replica has ranks [": {"kind": "ddp-world"},
    "nothing keeps the models of ranks [": {"kind": "plain"},
    "between is 'replicas': expected one of the dimensions of mesh, replica, shard": {"between": "replicas"},
    "mesh needs between, the name of its dimension of replicas": {"between": None},
    "mesh has 2 ranks and the process group 4": {"slice": "shard"},
    "divisible compresses a gradient as a whole": {"method": "divisible", "settings": {}},
    "ranks differ in method": {"ranks": {3: {"settings": {"period": 5}}}},
    "ranks differ in parameter 0.weight: 8x6 float32 ('S(0)',) on ranks 0-2; 10x6": {"ranks": {3: {"width": 10}}},
    "wire does not work with mesh yet": {"settings": {"wire": "bfloat16"}},
    "fragments need parts of equal size": {"method": "diloco", "width": 7, "settings": {"fragments": 2}},
}


def test_wrong_meshes_models_and_methods_are_refused_on_every_rank_and_the_right_one_trains():
    attempts = list(WRONG.values())
    order = {"shape": (2, 2), "kind": "fsdp", "method": "localsgd", "settings": {"period": 2}, "steps": 4}
    with RealWorkers(4, script=run, attempts=attempts, **order) as ranks:
        reports = ranks.finished()
        for rank in ranks:
            lines = [report["why"] for report in rank.reports if report["at"] == "refused"]
            assert len(lines) == len(WRONG)
            for line, expected in zip(lines, WRONG, strict=True):
                assert expected in line
    assert all(report["steps"] == 4 for report in reports)


@pytest.mark.parametrize(
    ("method", "killed", "left", "settings"), [("allreduce", 3, 2, {}), ("diloco", 2, 3, {"period": 2, "delay": 1})]
)
def test_a_replica_that_lost_a_rank_ends_the_others_go_on_and_it_comes_back(method, killed, left, settings, tmp_path):
    jobs = {"jobs": True, "ports": [free_port() for _ in range(4)], "address": f"127.0.0.1:{free_port()}"}
    order = {"kind": "fsdp", "method": method, "settings": settings, "compute_s": 0.05, "last": tmp_path / "last"}
    # The rank that is left is in no collective that would fail: it has to be told.
    order["hangs"] = 3 if left == 3 else None
    with RealWorkers(4, script=run, shape=(2, 2), **jobs, **order) as ranks:
        ranks[left].step(3)
        ranks.kill(killed)
        ranks[left].process.join(60)
        assert ranks[left].process.exitcode not in (0, None)
        while ranks[0].waiting():
            ranks[0].next()
        ranks[0].step(ranks[0].reports[-1]["step"] + 4)
        returned = [ranks.restart(rank) for rank in (2, 3)]
        joined = [rank.at("joined") for rank in returned]
        assert joined[0] == joined[1]
        assert joined[0]["step"] > 3
        (tmp_path / "part").write_text(str(joined[0]["step"] + 10))
        (tmp_path / "part").rename(tmp_path / "last")
        reports = ranks.finished()
    for report in reports:
        assert torch.equal(weights(report), weights(reports[0]))
        assert report["torn"] == 0


def test_a_replica_is_refused_as_a_whole_if_one_part_is_not_finite():
    reports = trained((2, 2), kind="fsdp", method="allreduce", spoilt_at=3)
    for rank, report in enumerate(reports):
        assert torch.equal(weights(report), weights(reports[0]))
        assert weights(report).isfinite().all()
        taken_over = [line for line in report["events"] if "were not finite: taking over those of others" in line]
        # Only rank 3 had a gradient that was not finite; rank 2 is of the same replica.
        assert len(taken_over) == (1 if rank in (2, 3) else 0)


@pytest.mark.parametrize("dying", [2, 3])
def test_a_mean_that_only_one_shard_completed_counts_for_none(dying):
    jobs = {"jobs": True, "ports": [free_port() for _ in range(4)], "address": f"127.0.0.1:{free_port()}"}
    order = {"kind": "fsdp", "method": "allreduce", "steps": 8, "dies_in_mean": dying, "at_step": 3}
    with RealWorkers(4, script=run, shape=(2, 2), **jobs, **order) as ranks:
        ranks[dying].died()
        reports = ranks.finished([0, 1])
        # Ranks 0 and 1 are of one replica: neither applied a mean that the other did not.
        assert [report["torn"] for report in reports] == [0, 0]
        assert [report["steps"] for report in reports] == [8, 8]
        assert torch.equal(weights(reports[0]), weights(reports[1]))
        voids = [sum(report["at"] == "step" for report in ranks[rank].reports) - 8 for rank in (0, 1)]
        assert voids == [1, 1]
