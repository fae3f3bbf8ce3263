"""What workers say while they train: deaths, returns, slow workers, too few exchanges."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ending_script import train
from real_workers import RealWorkers, Report

from gossamer.process.events import EventKind, Events
from gossamer.process.liveness.heartbeats import Progress
from gossamer.process.pairwise import delivery
from gossamer.process.pairwise.delivery import DeliveryWatch
from gossamer.process.watches import peer_watch
from gossamer.process.watches.peer_watch import PeerWatch, death_text, return_text
from gossamer.runs.event_lines import EventLines

LONG = 100_000
METHODS = [("a2cid2", {}), ("allreduce", {}), ("localsgd", {"period": LONG})]
"""Pairwise; waiting for the others; and one that does not communicate for now."""


def kinds(end: Report, *wanted: str) -> list[tuple[str, int]]:
    return [(kind, rank) for kind, rank, _ in end["events"] if kind in wanted]


def said(workers: RealWorkers, rank: int, kind: str) -> Report:
    return workers[rank].until(lambda report: report["at"] == "event" and report["kind"] == kind)


@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_every_survivor_says_who_died(method: str, settings: dict[str, int], tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    order = {"method": method, "settings": settings, "steps": LONG, "pause_s": 0.01, "until": stop}
    with RealWorkers(3, script=train, **order) as workers:
        for worker in workers:
            worker.step(10)
        killed_at = time.time()
        workers.kill(2)
        for rank in (0, 1):
            event = said(workers, rank, "died")
            assert event["rank"] == 2
            assert killed_at <= event["time"] <= time.time()
        stop.touch()
        ends = workers.finished([0, 1])
    for rank, end in enumerate(ends):
        assert kinds(end, "died", "alone", "not-averaged", "returned") == [("died", 2)]
        assert sum(f"worker {rank}: worker 2 died" in line for line in end["log"]) == 1
    # On the ring of three both are neighbours of the dead one. The end of the training is no loss.
    assert all(end["lost"] >= 1 for end in ends) if method == "a2cid2" else all(end["lost"] == 0 for end in ends)


def test_a_worker_is_alone_once_until_it_has_company_again(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with RealWorkers(2, script=train, method="gossip", steps=LONG, pause_s=0.01, until=stop) as workers:
        workers[0].step(10)
        workers.kill(1)
        said(workers, 0, "alone")
        workers.restart(1).step(10)
        said(workers, 0, "returned")
        workers.kill(1)
        said(workers, 0, "alone")
        stop.touch()
        (end,) = workers.finished([0])
    told = kinds(end, "died", "alone", "returned", "not-averaged")
    assert [kind for kind, _ in told] == ["died", "alone", "returned", "died", "alone", "not-averaged"]
    assert end["before"] == end["after"]


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_who_finishes_early_has_not_died(method: str) -> None:
    with RealWorkers(2, script=train, method=method, steps=[100, 20], pause_s=0.02) as workers:
        ends = workers.finished()
    for end in ends:
        assert kinds(end, "died", "alone", "returned", "not-averaged") == []
        assert end["lost"] == 0


def test_who_closes_without_finishing_has_died() -> None:
    with RealWorkers(2, script=train, method="gossip", steps=[100, 10], pause_s=0.02, closes=[1]) as workers:
        end, _ = workers.finished()
    assert kinds(end, "died", "alone", "not-averaged") == [("died", 1), ("alone", 0), ("not-averaged", 0)]


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_a_slow_worker_is_said(method: str, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    order = {"method": method, "steps": LONG, "pause_s": [0.01, 0.15], "window_s": 0.5, "until": stop}
    with RealWorkers(2, script=train, **order) as workers:
        for worker in workers:
            # On a busy machine the other one may be slow for a while, too.
            worker.until(lambda report: (report["at"], report.get("kind"), report.get("rank")) == ("event", "slow", 1))
        stop.touch()
        workers.finished()


def test_missing_exchanges_are_said() -> None:
    with RealWorkers(2, script=train, method="a2cid2", steps=69, settings={"rate": 1000.0}) as workers:
        ends = workers.finished()
    for end in ends:
        assert len(kinds(end, "few-exchanges")) == 1


# Without processes


def test_what_several_workers_say_about_another_is_one_line() -> None:
    lines, died, back = EventLines(), death_text(2), return_text(2)
    assert lines.read(0, ["joined"]) == ["worker 0: joined"]
    assert lines.read(1, ["joined"]) == ["worker 1: joined"]
    assert lines.read(0, ["joined", died]) == [died]
    assert lines.read(1, ["joined", died, back]) == [back]
    # The supervisor sees the death after the others, and a second one before them.
    lines.saw_death(2)
    lines.saw_return(2)
    assert lines.read(0, ["joined", died, back]) == []
    lines.saw_death(2)
    assert lines.read(0, ["joined", died, back, died]) == []
    assert lines.read(1, ["joined", died, back, died]) == []
    # A worker that was restarted begins a new list.
    assert lines.read(1, ["joined"]) == ["worker 1: joined"]
    assert lines.read(0, ["joined", died, back, died, back, died]) == [back, died]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (peer_watch, delivery):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


class StillHeartbeats:
    """Heartbeats that the test moves."""

    def __init__(self, rank: int) -> None:
        self.rank, self.lost, self.progress = rank, set(), {}
        self.own = Progress(0, 0.0)
        self.gone: set[int] = set()
        self.store: dict[str, bytes] = {}

    def own_progress(self) -> Progress:
        return self.own

    def done(self, rank: int) -> bool:
        return False

    def left(self, rank: int) -> bool:
        return rank in self.gone


def test_slow_and_recovered_are_said_at_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, heartbeats, events = Clock(monkeypatch), StillHeartbeats(0), Events(0)
    watch = PeerWatch(range(3), heartbeats, events, lockstep=False)  # type: ignore[arg-type]
    steps = {0: 100.0, 1: 100.0, 2: 100.0}

    def window(slow_step_s: float) -> list[str]:
        clock.now += 5.0
        for rank, step_s in ((0, 0.1), (1, 0.1), (2, slow_step_s)):
            steps[rank] += 5.0 / step_s
            heartbeats.progress[rank] = Progress(int(steps[rank]), clock.now)
        heartbeats.own = heartbeats.progress.pop(0)
        before = len(events)
        watch.poll()
        return [f"{event.kind} {event.rank}" for event in events[before:]]

    told = [window(step_s) for step_s in (0.1, 0.1, 0.25, 0.1, 0.25, 0.25, 0.25, 0.18, 0.1, 0.1)]
    assert told == [[], [], [], [], [], ["slow 2"], [], [], ["recovered 2"], []]


def test_who_leaves_in_order_has_not_died(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    heartbeats, events = StillHeartbeats(0), Events(0)
    watch = PeerWatch(range(3), heartbeats, events, lockstep=False)  # type: ignore[arg-type]
    heartbeats.gone.add(1)
    for rank in (1, 2):
        heartbeats.lost.add(rank)
        heartbeats.on_death(rank)  # type: ignore[attr-defined]
    assert [(event.kind, event.rank) for event in events] == [(EventKind.DIED, 2), (EventKind.ALONE, 0)]
    watch.ended = True
    heartbeats.on_return(2)  # type: ignore[attr-defined]
    assert len(events) == 2


def test_the_line_about_a_failure_is_one_line_of_bounded_length(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    heartbeats, events = StillHeartbeats(0), Events(0)
    PeerWatch(range(4), heartbeats, events, lockstep=False)  # type: ignore[arg-type]
    heartbeats.store = {"failure/1": b"a\n\xff\x1b[2J" + b"x" * 10_000, "failure/2": b""}
    for rank in (1, 2, 3):
        heartbeats.on_death(rank)  # type: ignore[attr-defined]
    (failed,) = [event for event in events if event.kind == EventKind.FAILED]
    assert failed.rank == 1
    assert "program: a?\ufffd?[2Jxx" in str(failed)
    assert str(failed).isprintable()
    assert len(str(failed)) < 400


def test_few_exchanges_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, events = Clock(monkeypatch), Events(0)
    watch = DeliveryWatch(events)
    watch.asked(1.0)

    def window(steps: int, merged: int, own: int, company: bool = True) -> int:
        clock.now += 5.0
        watch.num_merged += merged
        watch.num_own_merged += own
        window.step += steps  # type: ignore[attr-defined]
        watch.poll(window.step, company)  # type: ignore[attr-defined]
        return len(events)

    window.step = 0  # type: ignore[attr-defined]
    assert window(100, 60, 30) == 0
    # The neighbour is done and offers no more: half of the exchanges are missing, but none of our own.
    assert window(100, 49, 49) == 0
    assert window(100, 0, 0, company=False) == 0
    assert window(100, 49, 24) == 1
    assert window(100, 0, 0) == 1
    assert "only 49 of about 100 exchanges took place in 100 steps (rate 1)" in str(events[0])


def test_a_short_run_says_it_in_the_end() -> None:
    events = Events(0)
    watch = DeliveryWatch(events)
    watch.asked(1.0)
    watch.num_merged = 18
    watch.poll(69, company=True)
    assert not events
    watch.poll(69, company=True, ended=True)
    assert [event.kind for event in events] == [EventKind.FEW_EXCHANGES]


def test_an_infinite_rate_asks_for_no_number() -> None:
    events = Events(0)
    watch = DeliveryWatch(events)
    watch.asked(float("inf"))
    watch.poll(1000, company=True, ended=True)
    assert not events
