"""The recorder's aggregates against sums computed by hand and by brute force."""

import json

import numpy as np
import pytest

from gossamer.recording import KINDS, Recorder, Timeline
from gossamer.recording.recorder import MAX_EDGES, MAX_STALENESS
from gossamer.recording.timeline import unpack


def shares(document):
    """The timeline's shares by kind: workers × bins, between 0 and 1."""
    return {kind: unpack(document, kind) / 255 for kind in document["timeline"]["shares"]}


@pytest.mark.parametrize("seed", range(5))
def test_bins_hold_the_time_that_falls_into_them(seed):
    rng = np.random.default_rng(seed)
    workers, count = 3, 400
    rows = rng.integers(workers, size=count)
    starts = rng.uniform(0, 10.0 ** rng.integers(-2, 4), size=count)
    ends = starts + rng.exponential(0.1 * starts.max(), size=count)
    timeline = Timeline(workers)
    for part in np.array_split(np.arange(count), 7):
        timeline.add(2, rows[part], starts[part], ends[part])
    edges = np.arange(timeline.bins + 1) * timeline.width
    for worker in range(workers):
        mine = rows == worker
        covered = np.minimum(ends[mine, None], edges[1:]) - np.maximum(starts[mine, None], edges[:-1])
        np.testing.assert_allclose(
            timeline.shares[2, worker] * timeline.width, np.maximum(covered, 0).sum(0), atol=1e-9
        )
    np.testing.assert_allclose(timeline.totals()[2], [(ends - starts)[rows == w].sum() for w in range(workers)])
    assert timeline.width * timeline.bins / 2 < ends.max() <= timeline.width * timeline.bins
    assert not timeline.shares[[0, 1, 3, 4]].any()


def test_a_run_recorded_by_hand():
    recorder = Recorder(range(3))
    recorder.stepped(0, 0.0, 1.0, 1.5)
    recorder.waited(0, 1.0, 1.25)
    recorder.stepped(1, 0.0, 2.0, 2.0)
    recorder.exchanged((0, 1), 1.0, 2.0, 100)
    recorder.exchanged((0, 1), 2.0, 3.0, 100)
    recorder.exchanged((0, 1, 2), 3.0, 3.5, 10)
    recorder.merged(0, 2.0, 2.0, 3)
    recorder.merged(0, 3.0, 3.0, 1)
    recorder.merged(1, 3.0, 3.0, 1)
    recorder.left(2, 1.0)
    recorder.joined(2, 3.0)
    recorder.left(1, 3.5)
    recorder.add_event(1.0, "worker 2 gone")
    document = json.loads(json.dumps(recorder.document(now=4.0)))
    assert document["until"] == 4.0
    assert document["steps"] == [1, 1, 0]
    expected = {"compute": [1, 2, 0], "step": [0.25, 0, 0], "wait": [0.25, 0, 0]}
    expected |= {"exchange": [2.5, 2.5, 0.5], "dead": [0, 0.5, 2]}
    assert {kind: pytest.approx(times) for kind, times in expected.items()} == document["time"]
    assert document["staleness"] == {"counts": [[1, 2], [3, 1]], "worker_mean": [2.0, 1.0, None], "max": 3}
    # In a ring of three each sends to the next; the two of a pair send to each other.
    assert document["edges"] == [[0, 1, 410, 3], [0, 2, 10, 1], [1, 2, 10, 1]]
    assert document["events"] == [[1.0, "worker 2 gone"]]
    by_kind, width = shares(document), document["timeline"]["width"]
    assert set(by_kind) == set(KINDS)
    assert by_kind["dead"].sum(axis=1) * width == pytest.approx([0, 0.5, 2])
    # A worker that is absent now may join again: the document above did not change the recorder.
    recorder.joined(1, 5.0)
    assert recorder.document()["time"]["dead"] == pytest.approx([0, 1.5, 2])


def test_the_size_does_not_depend_on_the_length_of_the_run():
    sizes = []
    for steps in (2_000, 50_000):
        recorder = Recorder(range(4))
        for step in range(steps):
            rank, time = step % 4, 0.1 * step
            recorder.stepped(rank, time, time + 0.2, time + 0.3)
            recorder.waited(rank, time + 0.2, time + 0.3)
            recorder.exchanged((rank, (rank + 1) % 4), time, time + 0.1, 1000)
            recorder.merged(rank, time, time, step % 7)
        buffers = (recorder._steps, recorder._waits, recorder._exchanges, recorder._merges, recorder._absences)
        assert sum(map(len, buffers)) < 5 * (1 << 16)
        document = recorder.document()
        assert sum(document["steps"]) == steps
        sizes.append(len(json.dumps(document)))
    assert sizes[1] < 2.1 * sizes[0]


def test_very_stale_vectors_and_surplus_edges_are_aggregated():
    recorder = Recorder(range(200))
    recorder.merged(0, 1.0, 1.0, MAX_STALENESS + 45)
    pairs = [(a, b) for a in range(200) for b in range(a)]
    for weight, pair in enumerate(pairs, start=1):
        recorder.exchanged(pair, 0.0, 1.0, weight)
    document = recorder.document()
    assert document["staleness"]["counts"] == [[MAX_STALENESS, 1]]
    assert document["staleness"]["max"] == MAX_STALENESS + 45
    assert len(document["edges"]) == MAX_EDGES
    assert document["edges"][0][2] == 2 * len(pairs)
    assert sum(edge[2] for edge in document["edges"]) + document["other_bytes"] == len(pairs) * (len(pairs) + 1)


def test_a_real_worker_counts_only_what_it_sends():
    recorder = Recorder([2])
    recorder.stepped(2, 0.0, 1.0, 1.5)
    recorder.exchanged((2, 5), 0.0, 1.0, 100)
    recorder.exchanged((1, 2, 3), 1.0, 2.0, 7)
    document = recorder.document()
    assert document["workers"] == [2]
    assert document["steps"] == [1]
    assert document["time"]["exchange"] == [2.0]
    assert document["edges"] == [[2, 5, 100, 1], [2, 3, 7, 1]]
