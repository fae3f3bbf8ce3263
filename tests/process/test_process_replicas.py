"""Replicas: workers of several ranks with DDP, FSDP2 or tensor parallel inside."""

import math

import pytest
import torch
from real_workers import RealWorkers
from replica_script import run

from gossamer.errors import InputError
from gossamer.process.roster.newcomer import Newcomer
from gossamer.process.store.rank_info import free_port, own_prefix
from gossamer.train.newcomers.join_run import JoinedRun

METHODS = {
    "allreduce": {},
    "localsgd": {"period": 3},
    "diloco": {"period": 4, "delay": 2, "fragments": 2},
    "overlap": {},
    "sgp": {},
}
IN_DDP = {"divisible": {"period": 3, "delay": 1, "warmup": 2, "ratio": 8}}


KINDS = ("fsdp", "ddp", "tp")
ROUNDS = [(kind, method) for kind in KINDS for method in METHODS] + [("ddp", "divisible")]
OF_THREE = ("overlap", "sgp")
"""These communicate with one or two others at a time, so that three replicas differ from two."""


def weights(report, what="weights"):
    return torch.cat([torch.tensor(values).flatten() for values in report[what]])


def trained(shape, **order):
    """What each rank reports in the end."""
    with RealWorkers(math.prod(shape), script=run, shape=shape, **order) as ranks:
        return ranks.finished()


def trained_in_rounds(shape, rounds):
    """What each rank reports of each round, by the round: all in one start of the processes."""
    parts = [
        {"kind": kind, "method": method, "settings": {**METHODS, **IN_DDP}[method], "other_start": True}
        for kind, method in rounds
    ]
    with RealWorkers(math.prod(shape), script=run, shape=shape, rounds=parts, steps=8) as ranks:
        return {each: [rank.at("trained") for rank in ranks] for each in rounds}


@pytest.fixture(scope="module")
def plain():
    """The weights of two replicas of one rank, by method."""
    rounds = [("ddp", method) for method in (*METHODS, *IN_DDP)]
    return {method: reports[0] for (_, method), reports in trained_in_rounds((2, 1), rounds).items()}


@pytest.fixture(scope="module")
def of_two_ranks():
    return trained_in_rounds((2, 2), ROUNDS)


def check_equal(reports, expected):
    """Check that all ranks of all replicas have the weights that replicas of one rank have."""
    for report in reports:
        assert torch.equal(weights(report), weights(reports[0]))
        assert torch.equal(weights(report, "averaged"), weights(reports[0], "averaged"))
        torch.testing.assert_close(weights(report), weights(expected), rtol=0, atol=1e-6)
        torch.testing.assert_close(weights(report, "averaged"), weights(expected, "averaged"), rtol=0, atol=1e-6)
        assert report["torn"] == 0


@pytest.mark.parametrize(("kind", "method"), ROUNDS)
def test_replicas_of_two_ranks_end_as_replicas_of_one(kind, method, of_two_ranks, plain):
    reports = of_two_ranks[kind, method]
    check_equal(reports, plain[method])
    assert [report["mean"] for report in reports] == [1.5] * 4
    assert [report["shard"] for report in reports] == [[0, 2], [1, 2], [0, 2], [1, 2]]


def test_replicas_of_a_mesh_of_two_by_two_end_as_replicas_of_one(plain):
    rounds = [("fsdp-tp", "allreduce"), ("fsdp-tp", "diloco")]
    for (_, method), reports in trained_in_rounds((2, 2, 2), rounds).items():
        check_equal(reports, plain[method])
        assert [report["shard"] for report in reports] == [[shard, 4] for shard in range(4)] * 2
        # Each weight of the first layer lies on one rank, the bias of the last one on two.
        assert {report["size"] for report in reports[:4]} == {(8 * 6 + 8 + 4 * 8) // 4 + 4 // 2}


def test_three_replicas_of_two_ranks_end_as_three_of_one():
    plain = trained_in_rounds((3, 1), [("ddp", method) for method in OF_THREE])
    for (_, method), reports in trained_in_rounds((3, 2), [("fsdp", method) for method in OF_THREE]).items():
        check_equal(reports, plain["ddp", method][0])


WRONG = {
    "is spread over ranks [0, 1, 2, 3], and this replica has ranks [": {"kind": "fsdp-world"},
    "DDP averages over ranks [0, 1, 2, 3], and this replica has ranks [": {"kind": "ddp-world"},
    "nothing keeps the models of ranks [": {"kind": "plain"},
    "the parameter 2.weight is in no module that fully_shard has wrapped": {"kind": "fsdp-blocks"},
    "between is 'replicas': expected one of the dimensions of mesh, replica, shard": {"between": "replicas"},
    "mesh needs between, the name of its dimension of replicas": {"between": None},
    "mesh has 2 ranks and the process group 4": {"slice": "shard"},
    "divisible compresses a gradient as a whole": {"method": "divisible", "settings": {}},
    "ranks differ in method": {"ranks": {3: {"settings": {"period": 5}}}},
    "ranks differ in parameter 0.weight: 8x6 float32 ('S(0)',) on ranks 0-2; 10x6": {"ranks": {3: {"width": 10}}},
    "a worker comes to a run (at) with a method by name and without mesh": {"settings": {"at": "127.0.0.1:1"}},
    "wire does not work with mesh yet": {"settings": {"wire": "bfloat16"}},
    "fragments need parts of equal size": {"method": "diloco", "width": 7, "settings": {"fragments": 2}},
}


def test_wrong_meshes_models_and_methods_are_refused_on_every_rank_and_the_right_one_trains():
    attempts = list(WRONG.values())
    order = {
        "shape": (2, 2),
        "kind": "fsdp",
        "method": "localsgd",
        "settings": {"period": 2},
        "steps": 4,
        "leaves": True,
    }
    with RealWorkers(4, script=run, attempts=attempts, **order) as ranks:
        reports = ranks.finished()
        for rank in ranks:
            lines = [report["why"] for report in rank.reports if report["at"] == "refused"]
            for line, expected in zip(lines, [*WRONG, "leave() is for workers of one rank"], strict=True):
                assert expected in line
    assert all(report["steps"] == 4 for report in reports)


@pytest.mark.parametrize(
    "come", [lambda at: JoinedRun(at, 1, {}), lambda at: Newcomer(at, None, 10, prefix=own_prefix)]
)
def test_nobody_can_come_to_a_run_of_replicas(come, monkeypatch):
    monkeypatch.setattr("gossamer.train.newcomers.join_run.BEGIN_TIMEOUT_S", 10.0)
    address = f"127.0.0.1:{free_port()}"
    jobs = {"jobs": True, "ports": [free_port() for _ in range(2)], "address": address}
    with RealWorkers(4, script=run, shape=(2, 2), kind="ddp", method="gossip", steps=1_000_000, **jobs) as ranks:
        ranks[0].at("joined")
        # gossamer train --join, and join(at=…): at once, while the run goes on.
        with pytest.raises(InputError, match=f"the run at {address} takes no more workers: its workers are replicas"):
            come(address)


SIZES = (
    "replicas differ in number of ranks: 2 on replica 0; 3 on replica 1: "
    "all replicas need the same number; start each with as many processes (torchrun --nproc-per-node)"
)


@pytest.mark.parametrize(("kind", "method"), [("ddp", "gossip"), ("fsdp", "diloco")])
def test_jobs_of_two_and_three_ranks_are_refused_on_every_rank_soon(kind, method):
    jobs = {"jobs": True, "ports": [free_port() for _ in range(2)], "address": f"127.0.0.1:{free_port()}"}
    with RealWorkers(5, script=run, sizes=(2, 3), kind=kind, method=method, **jobs) as ranks:
        # Without being told, the rank that has no counterpart waits as long as its ``timeout`` of 60 s.
        lines = [rank.at("refused", 40)["why"] for rank in ranks]
    assert lines == [SIZES] * 5


def test_jobs_that_shard_otherwise_are_refused():
    jobs = {"jobs": True, "ports": [free_port() for _ in range(2)], "address": f"127.0.0.1:{free_port()}"}
    kinds = {"kind": "fsdp", "ranks": {2: {"kind": "tp"}, 3: {"kind": "tp"}}}
    with RealWorkers(4, script=run, shape=(2, 2), method="gossip", **kinds, **jobs) as ranks:
        lines = [rank.at("refused", 40)["why"] for rank in ranks]
    assert lines == [lines[0]] * 4
    assert lines[0] == (
        "replicas differ in placement of 2.weight: S(0) over 2 ranks on replica 0; S(1) over 2 ranks on replica 1: "
        "use the same parallelism inside all of them, over the same inner mesh"
    )


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
