"""Real workers: their recordings agree with the result, are on one clock, and their traces join into one."""

import contextlib
import io
import json

import pytest

from gossamer.cli import main
from gossamer.report.document import report_document
from gossamer.report.runs import read_run


def train(folder, *options):
    """Run ``gossamer train``."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["train", "--workers", "3", "--compute", "10ms", *options, "--out", str(folder), "--json"])
    assert code == 0
    return json.loads(printed.getvalue())["results"]


METHODS = ("gossip", "overlap")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    results = train(folder, "--method", ",".join(METHODS), "--steps", "40", "--straggler", "1:3")
    return {result["method"]: (folder / result["method"], result) for result in results}


@pytest.mark.parametrize("method", METHODS)
def test_a_real_run_is_reported(runs, method):
    folder, result = runs[method]
    (run,) = report_document([read_run(folder)])["runs"]
    assert (run["world"], run["finished"], run["notes"]) == ("process", True, [])
    workers = run["workers"]
    assert workers["ranks"] == [0, 1, 2]
    assert sum(workers["steps"]) == result["total_steps"]
    assert sum(edge[2] for edge in workers["edges"]) == result["bytes_sent"]
    for rank in range(3):
        spent = {kind: times[rank] for kind, times in workers["time"].items()}
        assert spent["dead"] == 0
        # Everything a worker did up to its last step is one of the three.
        assert spent["compute"] + spent["step"] + spent["wait"] == pytest.approx(workers["until"], rel=0.5)
        assert spent["exchange"] > 0
    ages = dict(workers["staleness"]["counts"])
    if method == "overlap":
        # The fast workers wait for the slow one.
        assert set(ages) == {1}
        assert workers["time"]["wait"][0] > workers["time"]["wait"][1]
    else:
        assert workers["steps"][1] < workers["steps"][0]
        # An exchange may have succeeded at one end and failed at the other.
        assert sum(count for _, _, _, count in workers["edges"]) == pytest.approx(result["exchanges"], abs=3)


def test_the_traces_of_real_workers_join_into_one(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, board = tmp_path / "run", tmp_path / "board"
    (result,) = train(folder, "--method", "gossip", "--steps", "30", "--trace", "--tensorboard", str(board))
    trace = json.loads((folder / "trace.json").read_text())
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {"compute", "step", "snapshot", "exchange", "merge"} <= {event["name"] for event in slices}
    assert len([event for event in slices if event["name"] == "step"]) == result["total_steps"]
    # Both members of an exchange give it the same name, so that arrows lead from one process to the other.
    starts, ends = ({event["id"]: event for event in events if event["ph"] == phase} for phase in ("s", "f"))
    matched = starts.keys() & ends.keys()
    assert len(matched) >= 0.9 * len(starts) > 0
    for name in matched:
        assert starts[name]["pid"] != ends[name]["pid"]
        # One clock: nothing arrives before it was sent.
        assert ends[name]["ts"] > starts[name]["ts"] - 1000
    read = EventAccumulator(str(board))
    read.Reload()
    assert {"train_loss", "busy/mean", "busy/worker_2", "worker_steps/worker_0"} <= set(read.Tags()["scalars"])
    shares = [read.Scalars(f"worker_steps/worker_{rank}")[-1].value for rank in range(3)]
    assert sum(shares) == result["total_steps"]
