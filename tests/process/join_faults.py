"""Workers that die, or do not fit, in the handshake of join, before anything is connected.

A part of the fault suite (``repeat_faults``).
"""

from __future__ import annotations

import re
from pathlib import Path

import join_script
import pytest
from fault_checks import once
from real_workers import RealWorker, RealWorkers, Report

from gossamer.process.store.home_store import RESOLVE_LIMIT_S

TIMEOUT_S = 12.0
SLACK_S = 5.0
"""Of a busy machine."""

NOWHERE = "no-such-host.invalid"
"""No name ends like this (RFC 2606)."""


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("dies", ["_publish_facts", "_look"])
@pytest.mark.parametrize("method", ["gossip", "allreduce", "lasgd"])
def test_killed_in_the_handshake(method: str, dies: str, victim: int) -> None:
    # The last worker comes late, so that the others are in the handshake meanwhile.
    order = {"method": method, "ranks": {victim: {"dies": dies}, 2: {"late_s": 3.0}}, "steps": 100, "compute_s": 0.01}
    with RealWorkers(3, script=join_script.run, **order) as workers:
        workers[victim].died()
        workers.restart(victim)
        ends = [worker.at("finished") for worker in workers]
    assert all(end["weights"] == ends[0]["weights"] for end in ends)


@pytest.mark.parametrize("own", [{"version": "9.9"}, {"width": 9}, {"method": "lasgd"}, {"world": 4}])
@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_a_worker_that_comes_back_otherwise_is_refused(method: str, own: dict[str, object], tmp_path: Path) -> None:
    order = {"method": method, "steps": 100_000, "compute_s": 0.01, "until": tmp_path / "enough"}
    with RealWorkers(3, script=join_script.run, **order) as workers:
        for worker in workers:
            worker.at("joined")
        workers.kill(2)
        workers.order = {**order, "ranks": {2: own}}
        assert "comes to a run that has begun" in workers.restart(2).at("refused")["why"]
        workers.order = order
        workers.restart(2).at("joined")
        (tmp_path / "enough").touch()
        ends = [worker.at("finished") for worker in workers]
    assert all(end["weights"] == ends[0]["weights"] for end in ends)


@pytest.mark.parametrize("dies", ["_publish_facts", "_look"])
@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_rank_0_dies_before_the_first_meeting_and_does_not_come_back(method: str, dies: str) -> None:
    """The others begin without it, or end within their timeout with a line that names it."""
    ranks = {0: {"dies": dies}, 1: {"timeout": TIMEOUT_S}, 2: {"late_s": 3.0, "timeout": TIMEOUT_S}}
    with RealWorkers(3, script=join_script.run, method=method, ranks=ranks) as workers:
        workers[0].died()
        ends = [outcome(workers[rank]) for rank in (1, 2)]
    for end in ends:
        if end["at"] == "refused":
            assert re.search(r"worker 0|ranks? 0\b", end["why"])
            assert "\n" not in end["why"]
            assert end["after_s"] < TIMEOUT_S + SLACK_S
        else:
            assert any(kind == "died" and "rank 0 died before the start" in text for kind, text in end["events"])


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_rank_0_never_comes(method: str) -> None:
    ranks = {0: {"late_s": 600.0}, 1: {"timeout": TIMEOUT_S}, 2: {"timeout": TIMEOUT_S}}
    with RealWorkers(3, script=join_script.run, method=method, ranks=ranks) as workers:
        ends = [outcome(workers[rank]) for rank in (1, 2)]
    for end in ends:
        assert end["at"] == "refused"
        assert "start worker 0, and give all workers its MASTER_ADDR and MASTER_PORT" in end["why"]
        assert TIMEOUT_S - 1 < end["after_s"] < TIMEOUT_S + SLACK_S


@once
def test_a_name_that_does_not_resolve_ends_the_workers_soon() -> None:
    """Without a timeout of its own: that of join is much longer."""
    with RealWorkers(2, script=join_script.run, method="gossip", environment={"MASTER_ADDR": NOWHERE}) as workers:
        ends = [worker.at("refused") for worker in workers]
    for end in ends:
        assert f"MASTER_ADDR {NOWHERE!r} does not resolve" in end["why"]
        assert RESOLVE_LIMIT_S - 1 < end["after_s"] < RESOLVE_LIMIT_S + SLACK_S


def outcome(worker: RealWorker) -> Report:
    return worker.until(lambda report: report["at"] in ("refused", "finished"))
