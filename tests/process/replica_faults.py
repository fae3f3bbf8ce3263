"""Ranks of replicas that are killed while the others exchange: a part of the fault suite (``repeat_faults``)."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import replica_script
from real_workers import RealWorkers

from gossamer.process.store.rank_info import free_port

REPLICAS, SHARDS = 3, 2
SETTINGS = {"gossip": {"rate": 0.5}, "a2cid2": {"rate": 0.5}, "lasgd": {}, "noloco": {"period": 4}}


@pytest.mark.parametrize("method", SETTINGS)
def test_a_replica_that_lost_a_rank_delays_nobody_and_exchanges_again(method: str, run: int, tmp_path: Path) -> None:
    # The second rank of the replica, or in every other run its first one.
    killed = 2 + run % 2
    jobs = {"jobs": True, "ports": [free_port() for _ in range(2 * REPLICAS)], "address": f"127.0.0.1:{free_port()}"}
    order = {"kind": "fsdp", "method": method, "settings": SETTINGS[method], "constant": True, "compute_s": 0.05}
    shape, survivors = (REPLICAS, SHARDS), [0, 1, 4, 5]
    with RealWorkers(
        math.prod(shape), script=replica_script.run, shape=shape, last=tmp_path / "last", **jobs, **order
    ) as ranks:
        for rank in ranks:
            rank.exchanged(more_than=3)
        longest = {rank: ranks[rank].reports[-1]["longest"] for rank in survivors}
        ranks.kill(killed)
        other = ranks[5 - killed]
        other.process.join(30)
        assert other.process.exitcode not in (0, None)
        for rank in survivors:
            while ranks[rank].waiting():
                ranks[rank].next()
            before = ranks[rank].reports[-1]
            after = ranks[rank].step(before["step"] + 20)
            assert after["exchanges"] > before["exchanges"]
            assert after["longest"] < longest[rank] + 1
        began = time.monotonic()
        for rank in [ranks.restart(rank) for rank in (2, 3)]:
            rank.exchanged()
        assert time.monotonic() - began < 10
        (tmp_path / "last").touch()
        reports = ranks.finished()
    for report in reports:
        assert report["torn"] == []
        assert report["weights"] == reports[0]["weights"]
