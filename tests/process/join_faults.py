"""Workers that die, or do not fit, in the handshake of join, before anything is connected.

A part of the fault suite (``repeat_faults``).
"""

from __future__ import annotations

from pathlib import Path

import join_script
import pytest
from real_workers import RealWorkers


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
