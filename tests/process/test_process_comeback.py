"""A worker that was killed and started again takes over a state at once, whatever the others are doing."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from real_workers import RealWorkers
from training_script import train

from gossamer.process.collectives.member_entries import MemberEntries


def train_and_name_groups(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    """Train, and report the names of the process groups that this worker has waited for."""
    names: list[str] = []
    await_all = MemberEntries.await_all

    def note(self: MemberEntries, name: str, *arguments: Any) -> dict[int, bytes]:
        names.append(name)
        return await_all(self, name, *arguments)

    MemberEntries.await_all = note  # type: ignore[method-assign]
    train(rank, environment, order, out)
    out.send({"at": "groups", "names": names})


def test_a_peer_gives_its_state_also_while_it_looks_for_no_exchange() -> None:
    # After the first exchange of the run the survivor would pair again in a million steps only.
    with RealWorkers(2, method="noloco", settings={"period": 1_000_000}, steps=100_000) as workers:
        for worker in workers:
            worker.exchanged()
        workers.kill(1)
        joined = workers.restart(1).at("joined")
        workers[0].step(workers[0].reports[-1]["step"] + 20)
    assert any("took over the weights of worker 0" in event for event in joined["events"])


@pytest.mark.parametrize("method", ["a2cid2", "allreduce"])
def test_a_worker_that_is_started_again_exchanges_and_ends_with_the_weights_of_the_others(
    method: str, tmp_path: Path
) -> None:
    order = {"method": method, "steps": 100_000, "until": tmp_path / "enough"}
    with RealWorkers(3, script=train_and_name_groups, **order) as workers:
        for worker in workers:
            worker.step(50)
        workers.kill(2)
        back = workers.restart(2)
        assert any("came back" in event for event in back.at("joined")["events"])
        back.exchanged()
        (tmp_path / "enough").touch()
        ends = workers.finished()
        names = back.at("groups")["names"]
    # It takes no part in what its predecessor was a member of: nobody would come.
    assert not [name for name in names if name.startswith("group/train/0-")]
    assert ends[0]["weights"] == ends[1]["weights"] == ends[2]["weights"]
    assert all(end["accuracy"] > 0.9 and not end["threads"] for end in ends)
