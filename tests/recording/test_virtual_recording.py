"""The recording of a virtual run agrees with the result of the run, for every method."""

import pytest

from gossamer.config import resolve
from gossamer.methods import METHODS
from gossamer.recording import Recorder
from gossamer.virtual.simulation import simulate


def recorded(**settings):
    (run,) = resolve({"task": "quadratic", "workers": 6, "steps": 30, **settings})
    recorder = Recorder(range(run.config.workers))
    result = simulate(run, recorder=recorder)
    return result, recorder.document(result.final.time)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_sums_agree_with_the_result(method, clock):
    result, document = recorded(method=method, clock=clock)
    assert sum(document["steps"]) == result.final.total_steps
    assert document["time"]["compute"] == pytest.approx(result.worker_compute_time, rel=1e-6, abs=1e-6)
    assert document["time"]["wait"] == pytest.approx(result.worker_idle_time, rel=1e-6, abs=1e-6)
    assert document["time"]["dead"] == [0.0] * 6
    # Exchanges in flight at the end are in the bytes sent, but never completed.
    traffic = sum(edge[2] for edge in document["edges"])
    assert traffic == pytest.approx(result.final.bytes_sent, rel=0.05)


def test_recording_changes_nothing():
    (run,) = resolve({"task": "quadratic", "workers": 6, "steps": 30, "method": "a2cid2"})
    plain, (recorded_result, _) = simulate(run), recorded(method="a2cid2")
    assert plain.final.time == recorded_result.final.time
    assert plain.final.consensus == recorded_result.final.consensus


def test_staleness_is_the_steps_between_sending_and_merging():
    counts = {
        method: dict(recorded(method=method, compute="constant:10ms")[1]["staleness"]["counts"])
        for method in ("allreduce", "overlap", "gossip")
    }
    assert counts["allreduce"] == {0: 6 * 30}
    assert set(counts["overlap"]) == {1}
    # A ring of six takes ten latencies of 4.2 ms: four steps of 10 ms, or five.
    slow = recorded(method="lasgd", compute="constant:10ms", link="inf/4.2ms", period=0)[1]
    assert {age for age, _ in slow["staleness"]["counts"]} == {4, 5}


def test_workers_that_die_and_workers_that_join_late():
    result, document = recorded(method="gossip", compute="constant:10ms", fail="2@0.1", join="2@0.2,4@0.05")
    assert document["time"]["dead"] == pytest.approx([0, 0, 0.1, 0, 0.05, 0], abs=0.011)
    assert [text for _, text in document["events"]] == result.events
    # Each has its own time, not that of the next point of the history; joining waits for a peer's step.
    assert [time for time, _ in document["events"]] == pytest.approx([0.05, 0.1, 0.2], abs=0.011)
    assert document["events"][1][0] == 0.1
