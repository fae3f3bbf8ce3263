"""Methods that do not wait, between replicas of two ranks: each exchange is merged on both ranks, or on none."""

import math

import pytest
from real_workers import RealWorkers
from replica_script import run

from gossamer.process.store.rank_info import free_port

FAST = {"gossip": {"rate": 1.0}, "a2cid2": {"rate": 1.0}, "lasgd": {}, "noloco": {"period": 4}}
ROUNDS = [("fsdp", method) for method in FAST] + [("ddp", "a2cid2"), ("tp", "a2cid2")]


def test_exchanges_are_whole_and_keep_the_mean_of_all_replicas():
    rounds = [{"kind": kind, "method": method, "settings": FAST[method]} for kind, method in ROUNDS]
    with RealWorkers(4, script=run, shape=(2, 2), constant=True, rounds=rounds, steps=30, compute_s=0.003) as ranks:
        rounds = [[rank.at("trained") for rank in ranks] for _ in ROUNDS]
        ranks.finished()
    for (_, method), reports in zip(ROUNDS, rounds, strict=True):
        for report in reports:
            assert report["torn"] == []
            assert report["exchanges"] >= 2
            assert report["weights"] == reports[0]["weights"]
            assert report["conserved"][0] == report["conserved"][1]
            # That of the whole replicas, however many ranks hold a weight. NoLoCo's messages hold something else.
            told = report["consensus"] if method != "noloco" else report["consensus"][-1:]
            assert len(told) >= (3 if method in ("gossip", "a2cid2") else 1)
            for found, true in told:
                assert found == pytest.approx(true, rel=1e-3, abs=1e-5)
        if method != "noloco":
            expected = 0.5 + sum(report["added"] for report in reports) / len(reports)
            found = sum(report["conserved"][0] for report in reports) / len(reports)
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dying", [2, 3])
def test_an_exchange_that_only_one_shard_completed_counts_for_none(dying):
    jobs = {"jobs": True, "ports": [free_port() for _ in range(4)], "address": f"127.0.0.1:{free_port()}"}
    order = {"kind": "fsdp", "method": "gossip", "settings": {"rate": 1.0}, "steps": 60, "compute_s": 0.02}
    dies = {"dies_in_exchange": dying, "after": 3}
    with RealWorkers(4, script=run, shape=(2, 2), constant=True, **jobs, **order, **dies) as ranks:
        ranks[dying].died()
        reports = ranks.finished([0, 1])
    assert [report["torn"] for report in reports] == [[], []]
    assert [report["exchanges"] for report in reports] == [3, 3]
    # One of the two has sent a vector more: its exchange took place, and counted for nothing.
    sent = [report["bytes"] for report in reports]
    assert sent[dying - 2] < sent[3 - dying]


def test_a_replica_with_a_part_that_is_not_finite_takes_over_all_its_parts():
    order = {"kind": "fsdp", "method": "a2cid2", "settings": {"rate": 1.0}, "steps": 60, "spoilt_at": 10}
    with RealWorkers(4, script=run, shape=(2, 2), constant=True, compute_s=0.01, **order) as ranks:
        reports = ranks.finished()
    for rank, report in enumerate(reports):
        assert report["torn"] == []
        assert report["weights"] == reports[0]["weights"]
        assert all(map(math.isfinite, report["weights"][0]))
        taken_over = [line for line in report["events"] if "were not finite or absurdly large: took over" in line]
        assert len(taken_over) == (1 if rank in (2, 3) else 0)
