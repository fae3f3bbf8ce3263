"""Communication of two, also where one dies in the middle of it."""

from __future__ import annotations

import pytest
from gloo_script import communicate
from real_workers import RealWorkers


def test_two_trade_vectors() -> None:
    with RealWorkers(2, script=communicate, does="exchange") as workers:
        assert [end["result"] for end in workers.finished()] == [[1.0], [0.0]]


@pytest.mark.parametrize("after_ms", range(1, 9))
def test_who_trades_with_somebody_who_dies_half_way_notices_at_once(after_ms: int) -> None:
    with RealWorkers(2, script=communicate, does="exchange", dies=after_ms / 1000) as workers:
        workers[1].died()
        [end] = workers.finished([0])
    # It may have been through before.
    assert end["failed"] or end["result"] == [1.0]
    assert end["seconds"] < 5.0


@pytest.mark.parametrize("after_ms", range(2, 9, 3))
def test_a_severed_group_lets_go_of_who_waits_in_it(after_ms: int) -> None:
    with RealWorkers(2, script=communicate, does="broadcast", dies=after_ms / 1000) as workers:
        workers[1].died()
        [end] = workers.finished([0])
    assert end["failed"] or end["result"] == [1.0]
    assert end["seconds"] < 5.0


def test_whoever_is_late_is_waited_for() -> None:
    with RealWorkers(2, script=communicate, does="late") as workers:
        ends = workers.finished()
    assert [(end["failed"], end["result"]) for end in ends] == [(False, [2.0])] * 2
    assert ends[0]["seconds"] > 5.5
