"""Traces are valid in the Trace Event format, contain every occurrence, and join with those of the torch profiler."""

import json
from itertools import pairwise

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gossamer.config import resolve
from gossamer.errors import InputError
from gossamer.methods import METHODS
from gossamer.recording import Recorder
from gossamer.recording.trace import FIRST_PID, TraceFile, join
from gossamer.virtual.simulation import simulate

REQUIRED = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": str},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": str, "bp": str},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
}
"""Fields that the Trace Event format requires of the phases we use."""


def read_valid(path):
    """Check that the file is in the format, and return its trace events."""
    document = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        required = REQUIRED[event["ph"]]
        assert required.keys() <= event.keys(), event
        for field, kind in required.items():
            assert isinstance(event[field], (int, float) if kind is float else kind), event
        assert event.get("dur", 0) >= 0, event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index")
    return document["traceEvents"]


def of_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def assert_nested(events):
    """On each track a slice lies inside another or apart from it, as viewers demand."""
    tracks = {}
    for event in of_phase(events, "X"):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], -event["dur"]))
    for slices in tracks.values():
        open_until = []
        for start, length in sorted(slices):
            end = start - length
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 2e-3
            open_until.append(end)


def assert_flows_bind(events):
    """Every arrow has one start and one end, each inside an exchange of its worker."""
    slices = {}
    for event in of_phase(events, "X"):
        slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    starts, ends = ({event["id"]: event for event in of_phase(events, phase)} for phase in ("s", "f"))
    assert starts.keys() == ends.keys()
    assert len(starts) == len(of_phase(events, "s")) == len(of_phase(events, "f"))
    for name, start in starts.items():
        end = ends[name]
        sender, receiver = (int(rank) for rank in name.rpartition(":")[2].split(">"))
        assert (start["pid"], end["pid"]) == (FIRST_PID + sender, FIRST_PID + receiver)
        assert start["ts"] <= end["ts"]
        for event in (start, end):
            on_track = slices[event["pid"], event["tid"]]
            assert any(first <= event["ts"] < last for first, last in on_track), event
    return starts


def write_trace(path, **settings):
    (run,) = resolve({"task": "quadratic", "workers": 5, "steps": 12, **settings})
    trace = TraceFile(path, range(run.config.workers), began_ns=1_790_000_000_000_000_000, title="test")
    recorder = Recorder(range(run.config.workers), trace)
    result = simulate(run, recorder=recorder)
    recorder.flush()
    trace.close()
    return result


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("clock", ["ideal", "hardware"])
def test_the_trace_of_every_method_is_valid(method, clock, tmp_path):
    path = tmp_path / "trace.json"
    result = write_trace(path, method=method, clock=clock, fail="3@2" if clock == "ideal" else "3@0.2")
    events = read_valid(path)
    assert_nested(events)
    flows = assert_flows_bind(events)
    slices = of_phase(events, "X")
    steps = [event for event in slices if event["name"] == "step"]
    assert len(steps) == result.final.total_steps
    exchanges = [event for event in slices if event["name"] == "exchange"]
    assert len(exchanges) == len(flows) > 0
    for event in exchanges:
        assert event["args"]["sent_bytes"] > 0
        assert event["args"]["with"] != event["pid"] - FIRST_PID
    named = [event["args"]["name"] for event in of_phase(events, "M") if event["name"] == "process_name"]
    assert named == [f"worker {rank}" for rank in range(5)]
    assert {"compute", "step", "exchange", "merge"} <= {event["name"] for event in slices}


def test_the_file_is_complete_after_every_write(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceFile(path, [0, 1], began_ns=5, title="x")
    recorder = Recorder([0, 1], trace)
    sizes = [len(read_valid(path))]
    for step in range(3):
        recorder.stepped(0, step, step + 0.5, step + 0.7)
        recorder.snapshot(0, step, step + 0.1)
        recorder.exchanged((0, 1), step, step + 0.9, 10)
        recorder.flush()
        sizes.append(len(read_valid(path)))
    trace.close()
    # Two slices of a step, one snapshot, and for each member of the exchange a slice and the ends of two arrows.
    assert [after - before for before, after in pairwise(sizes)] == [9, 9, 9]


def test_concurrent_exchanges_are_on_separate_tracks(tmp_path):
    path = tmp_path / "trace.json"
    trace = TraceFile(path, [0, 1], began_ns=5, title="x")
    recorder = Recorder([0, 1], trace)
    recorder.exchanged((0, 1), 1.0, 2.0, 10)
    recorder.exchanged((0, 1), 0.5, 3.0, 10)
    recorder.exchanged((0, 1), 2.5, 3.5, 10)
    recorder.flush()
    trace.close()
    events = read_valid(path)
    assert_nested(events)
    assert_flows_bind(events)
    assert [event["tid"] for event in of_phase(events, "X") if event["pid"] == FIRST_PID] == [3, 4, 3]


def test_a_trace_joins_with_one_of_the_torch_profiler(tmp_path):
    ours, theirs, joined = (tmp_path / name for name in ("ours.json", "theirs.json", "joined.json"))
    write_trace(ours, method="gossip")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(50, 50) @ torch.ones(50, 50)
    profiled.export_chrome_trace(str(theirs))
    count = join([ours, theirs], joined)
    document = json.loads(joined.read_text())
    parts = [json.loads(path.read_text()) for path in (ours, theirs)]
    assert count == len(document["traceEvents"]) == sum(len(part["traceEvents"]) for part in parts)
    # On one axis: absolute times stay what they were.
    base = document["baseTimeNanoseconds"]
    for part in parts:
        name = "aten::mm" if part is parts[1] else "exchange"
        (first, *_), (then, *_) = (
            [event for event in trace["traceEvents"] if event["name"] == name] for trace in (part, document)
        )
        assert base + 1000 * then["ts"] == pytest.approx(part["baseTimeNanoseconds"] + 1000 * first["ts"], abs=1e3)
    pids = [{event["pid"] for event in part["traceEvents"]} for part in parts]
    assert not pids[0] & pids[1]


def test_files_that_are_not_traces_are_refused_in_one_line(tmp_path):
    wrong = tmp_path / "wrong.json"
    with pytest.raises(InputError, match="cannot be read"):
        join([wrong], tmp_path / "out.json")
    for text, message in (("{", "is not JSON"), ('{"a": 1}', "holds no traceEvents"), ("3", "holds no traceEvents")):
        wrong.write_text(text)
        with pytest.raises(InputError, match=message):
            join([wrong], tmp_path / "out.json")
    wrong.write_text("[]")
    with pytest.raises(InputError, match="cannot be written to"):
        join([wrong], tmp_path / "none" / "out.json")
    with pytest.raises(InputError, match="--trace "):
        TraceFile(tmp_path / "none" / "trace.json", [0], began_ns=0, title="")
