"""The document behind the page, of complete and of damaged run folders."""

import json
import math

import numpy as np
import pytest

from gossamer.cli import main
from gossamer.recording import Recorder
from gossamer.recording.timeline import unpack
from gossamer.report.document import MAX_POINTS, MAX_ROWS, report_document
from gossamer.report.recordings import join_recordings
from gossamer.report.runs import find_runs, read_run
from gossamer.runs.run_folder import FORMAT


def change_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def report(capsys, *arguments):
    """Return what ``gossamer report … --json`` prints."""
    capsys.readouterr()
    assert main(["report", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    """Return the one line that refuses the arguments."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_a_comparison_is_its_runs_in_the_order_they_ran(comparison, capsys):
    document = report(capsys, comparison)
    assert [run["name"] for run in document["runs"]] == ["gossip", "a2cid2", "allreduce"]
    assert document["axes"] == ["steps", "samples", "time", "bytes"]
    for run in document["runs"]:
        folder = comparison / run["name"]
        summary = json.loads((folder / "summary.json").read_text())
        points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert run["finished"]
        assert run["notes"] == []
        for field in ("accuracy", "worker_accuracy", "time", "utilization", "bytes_sent", "loss"):
            assert run["summary"][field] == summary[field]
        assert run["curves"]["loss"] == pytest.approx([point["loss"] for point in points], rel=1e-5)
        assert run["points"]["bytes"] == [point["bytes_sent"] for point in points]
        assert run["points"]["samples"][-1] == summary["samples"]
        assert run["points"]["time"] == pytest.approx([point["time"] for point in points], rel=1e-5)
        assert run["command"].startswith("gossamer simulate --workers 6")
        assert run["config"]["straggler"] == "1:3"
        workers = run["workers"]
        assert sum(workers["steps"]) == summary["total_steps"]
        assert workers["time"]["dead"][2] == pytest.approx(0.5, abs=0.25)
        assert len(workers["positions"]) == 6
        assert [text for _, text in run["events"]] == summary["events"]
    first, _, last = (run["summary"] for run in document["runs"])
    assert first["speedup"] == 1.0
    pace = last["total_steps"] / last["time"] * first["time"] / first["total_steps"]
    assert last["speedup"] == pytest.approx(pace)
    # Two at a time: only neighbours of the ring.
    for a, b, sent_bytes, exchanges in document["runs"][0]["workers"]["edges"]:
        assert (b - a) % 6 in (1, 5)
        assert sent_bytes > 0
        assert exchanges > 0


def test_runs_are_named_by_what_distinguishes_them(comparison, copied, capsys):
    names = [run["name"] for run in report(capsys, comparison / "gossip", copied)["runs"]]
    assert names == ["gossip", "copied"]
    config = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(config.replace('topology = "ring"', 'topology = "complete"'))
    names = [run["name"] for run in report(capsys, comparison / "gossip", copied)["runs"]]
    assert names == ["gossip, ring", "gossip, complete"]
    assert len(report(capsys, comparison, comparison / "gossip")["runs"]) == 3


def test_a_killed_run_is_shown_up_to_its_last_point(copied, capsys):
    lines = (copied / "metrics.jsonl").read_text().splitlines()[:10]
    (copied / "metrics.jsonl").write_text("\n".join(lines) + '\n{"time": 0.1, "ste')
    (copied / "summary.json").unlink()
    (copied / "model.safetensors").unlink()
    (run,) = report(capsys, copied)["runs"]
    assert not run["finished"]
    (note,) = run["notes"]
    assert "not finished" in note
    assert "step 9 of 40" in note
    assert run["summary"]["steps"] == 9
    assert len(run["curves"]["loss"]) == 10
    assert main(["report", str(copied), "--out", str(copied / "page.html")]) == 0
    assert "note: gossip: not finished" in capsys.readouterr().out


def test_a_run_at_its_very_start(copied, capsys):
    for path in copied.iterdir():
        if path.name not in ("run.json", "config.toml"):
            path.unlink()
    (run,) = report(capsys, copied)["runs"]
    assert run["curves"] == {}
    assert run["workers"] is None
    assert run["predicted"] is None
    assert "shown up to its start" in run["notes"][0]


def test_damaged_files_become_notes_and_the_rest_is_shown(copied, capsys):
    text = (copied / "metrics.jsonl").read_text().splitlines()
    text[3] = "garbage"
    (copied / "metrics.jsonl").write_text("\n".join(text) + "\n")
    (copied / "recording.json").write_text('{"format": 1, "workers": [0]}')
    (run,) = report(capsys, copied)["runs"]
    assert len(run["notes"]) == 2
    assert f"1 of {len(text)} lines of metrics.jsonl could not be read" in run["notes"][0]
    assert run["notes"][1] == "recording.json could not be read and is left out"
    assert run["workers"] is None


def test_folders_that_are_not_runs_are_refused_in_one_line(copied, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "does not exist" in refused(capsys, "report", tmp_path / "nothing")
    assert "is not the folder of a run" in refused(capsys, "report", empty)
    assert "is a file" in refused(capsys, "report", copied / "run.json")
    change_json(copied / "run.json", format=FORMAT + 1, gossamer="9.9.9")
    line = refused(capsys, "report", copied)
    assert "was written by gossamer 9.9.9" in line
    assert "update gossamer" in line
    (copied / "run.json").write_text("[]")
    assert "is not what gossamer writes there" in refused(capsys, "report", copied)
    (copied / "run.json").write_text("{")
    assert "cannot be read" in refused(capsys, "report", copied)


def test_settings_that_cannot_be_read_are_refused_in_one_line(copied, capsys):
    (copied / "config.toml").write_text("method = ")
    assert "config.toml cannot be read" in refused(capsys, "report", copied)


def test_a_page_that_cannot_be_written_is_refused_in_one_line(comparison, tmp_path, capsys):
    line = refused(capsys, "report", comparison, "--out", tmp_path / "none" / "page.html")
    assert "page.html cannot be written to" in line


def test_stopped_and_diverged_runs_have_notes(copied, capsys):
    change_json(copied / "summary.json", interrupted=True, steps=7, diverged={"time": 1.0, "worker": 3, "step": 5})
    notes = report(capsys, copied)["runs"][0]["notes"]
    assert notes[0] == "stopped by hand at step 7 of 40"
    assert notes[1].startswith("diverged: the loss of worker 3")


def test_long_curves_keep_their_peaks(copied):
    rng = np.random.default_rng(0)
    values = rng.normal(size=50_000)
    values[31_234], values[7_777] = 100.0, -100.0
    point = json.loads((copied / "metrics.jsonl").read_text().splitlines()[1])
    lines = [
        json.dumps({**point, "steps": k, "total_steps": 6 * k, "time": float(k), "loss": v})
        for k, v in enumerate(values)
    ]
    (copied / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = report_document([read_run(copied)])["runs"]
    steps, loss = run["points"]["steps"], run["curves"]["loss"]
    assert 200 < len(loss) == len(steps) <= MAX_POINTS
    assert {100.0, -100.0} <= set(loss)
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 49_999)
    assert loss[steps.index(31_234)] == 100.0


def test_time_lines_are_as_fine_as_the_page_has_room_for(copied):
    recorder = Recorder(range(200))
    for rank in range(200):
        for step in range(100):
            recorder.stepped(rank, step, step + 0.5, step + 0.5)
            recorder.waited(rank, step + 0.5, step + 0.5)
    recorder.left(150, 50.0)
    (copied / "recording.json").write_text(json.dumps(recorder.document(100.0)))
    (run,) = report_document([read_run(copied)])["runs"]
    timeline = run["workers"]["timeline"]
    assert len(timeline["rows"]) == MAX_ROWS
    assert [timeline["rows"][0][0], timeline["rows"][-1][1]] == [0, 199]
    assert 64 <= timeline["columns"] <= 160
    assert timeline["width"] * timeline["columns"] >= 100
    shape = {"workers": timeline["rows"], "timeline": {**timeline, "bins": timeline["columns"]}}
    compute, dead = (unpack(shape, kind) / 255 for kind in ("compute", "dead"))
    assert compute[:, :-1].mean() == pytest.approx(0.5, abs=0.02)
    # One of the three or four workers of its row, for the second half of the run.
    (row,) = (k for k, (first, last) in enumerate(timeline["rows"]) if first <= 150 <= last)
    assert dead[row, -2] == pytest.approx(1 / 3, abs=0.01)
    assert dead[row, 1] == 0


def test_recordings_of_single_workers_are_joined():
    one_for_all, parts = Recorder(range(3)), [Recorder([rank]) for rank in range(3)]
    rng = np.random.default_rng(1)
    for step in range(200):
        rank, time = int(rng.integers(3)), 0.01 * step
        for recorder in (one_for_all, parts[rank]):
            recorder.stepped(rank, time, time + 0.01, time + 0.02)
            recorder.merged(rank, time, time, step % 3)
        pair = (rank, (rank + 1) % 3)
        one_for_all.exchanged(pair, time, time + 0.005, 100)
        for member in pair:
            parts[member].exchanged((member, pair[0] + pair[1] - member), time, time + 0.005, 100)
    # One of them trained for much longer, so that its bins are wider.
    for recorder in (one_for_all, parts[2]):
        recorder.stepped(2, 2.0, 39.0, 40.0)
    one, other = one_for_all.document(), join_recordings([part.document() for part in reversed(parts)])
    assert other["workers"] == [0, 1, 2]
    for field in ("until", "steps", "staleness", "edges", "events"):
        assert other[field] == one[field], field
    assert {kind: pytest.approx(times) for kind, times in one["time"].items()} == other["time"]
    assert other["timeline"]["width"] == one["timeline"]["width"]
    for kind in one["time"]:
        mine, theirs = unpack(one, kind).astype(int), unpack(other, kind).astype(int)
        assert np.abs(mine - theirs).max() <= 1


def test_the_consensus_of_pure_averaging_is_predicted_without_a_fit(tmp_path):
    for method in ("gossip", "a2cid2", "overlap"):
        folder = tmp_path / method
        options = f"--task consensus --topology ring --workers 16 --steps 60 --clock ideal --method {method}"
        assert main(["simulate", *options.split(), "--out", str(folder), "--json"]) == 0
        (run,) = report_document([read_run(folder)])["runs"]
        measured, predicted = run["curves"]["consensus"], run["predicted"]
        assert predicted["value"][0] == pytest.approx(measured[0], rel=1e-5)
        at_points = np.interp(run["points"]["time"], predicted["time"], predicted["value"])
        # Down over two orders of magnitude, and never off by more than the randomness of one run.
        assert measured[-1] < measured[0] / 20
        assert np.abs(np.log(at_points / np.array(measured))).max() < math.log(2.0)


def test_methods_that_average_exactly_have_no_prediction(comparison):
    runs = {run["method"]: run for run in report_document([read_run(path) for path in find_runs(comparison)])["runs"]}
    assert runs["allreduce"]["predicted"] is None
    assert runs["gossip"]["predicted"] is not None


def test_a_topology_whose_file_was_removed_is_drawn_as_a_circle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.edges").write_text("0 1\n1 2\n2 0\n")
    options = "--task quadratic --topology own.edges --steps 5 --out run --json"
    assert main(["simulate", *options.split()]) == 0
    (tmp_path / "own.edges").unlink()
    (run,) = report_document([read_run(tmp_path / "run")])["runs"]
    assert run["predicted"] is None
    assert len(run["workers"]["positions"]) == 3
