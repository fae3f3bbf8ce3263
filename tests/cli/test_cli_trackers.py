"""``--trace``, ``--tensorboard`` and ``--tracker``: outputs of a run besides the screen."""

import json

import pytest


def test_a_trace_in_a_file_or_in_the_folder(gossamer, quick, tmp_path):
    assert gossamer(*quick, "--trace", "here.json").code == 0
    assert gossamer(*quick, "--out", "run", "--trace").code == 0
    traces = [json.loads((tmp_path / name).read_text()) for name in ("here.json", "run/trace.json")]
    here, there = ([event for event in trace["traceEvents"] if event["ph"] != "M"] for trace in traces)
    assert here == there
    assert len([event for event in here if event["name"] == "step"]) == 12


def test_several_methods_have_a_trace_each(gossamer, quick, tmp_path):
    assert gossamer(*quick, "--method", "gossip,lasgd", "--trace", "run.json").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run-gossip.json", "run-lasgd.json"}
    assert gossamer(*quick, "--method", "gossip,lasgd", "--out", "run", "--trace").code == 0
    assert (tmp_path / "run" / "gossip" / "trace.json").is_file()


def test_a_trace_needs_a_place(gossamer, quick):
    gossamer(*quick, "--trace").refused("--trace has no file and there is no --out")
    gossamer(*quick, "--trace", "none/trace.json").refused("--trace none/trace.json cannot be written to")


def test_tensorboard_has_all_metrics_per_worker_and_mean(gossamer, quick, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ran = gossamer("simulate", "--workers", "3", "--steps", "3", "--tensorboard", "board", "--json")
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    (result,) = ran.document["results"]
    tags = set(events.Tags()["scalars"])
    assert {"loss", "train_loss", "accuracy", "consensus", "bytes_sent", "utilization", "worker_accuracy/min"} <= tags
    for name in ("worker_steps", "worker_exchanges", "worker_bytes_sent", "busy", "worker_accuracy"):
        assert {f"{name}/mean", *(f"{name}/worker_{rank}" for rank in range(3))} <= tags, name
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses[:-1] == [(point["steps"], pytest.approx(point["loss"])) for point in result["history"]]
    shares = [events.Scalars(f"worker_steps/worker_{rank}")[-1].value for rank in range(3)]
    assert sum(shares) == result["total_steps"]


def test_a_tracker_of_ones_own(gossamer, quick, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import json\n\ndef track(step, scalars):\n"
        "    with open('seen.jsonl', 'a') as lines:\n        print(json.dumps([step, scalars]), file=lines)\n"
    )
    ran = gossamer(*quick, "--tracker", "mine.py", "--json")
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    history = ran.document["results"][0]["history"]
    points = [(step, figures["consensus"]) for step, figures in seen]
    # The method averages once more in the end: the last point comes again, as it came out.
    assert [*points[:-2], points[-1]] == [(point["steps"], point["consensus"]) for point in history]
    assert all(isinstance(value, int | float) for _, figures in seen for value in figures.values())


def test_a_tracker_sees_the_last_point_once_if_nothing_follows_it(gossamer, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def track(step, scalars):\n    with open('seen', 'a') as lines:\n        print(step, file=lines)\n"
    )
    gossip = ("simulate", "--task", "quadratic", "--workers", "3", "--steps", "4", "--method", "gossip")
    ran = gossamer(*gossip, "--tracker", "mine.py", "--json")
    history = ran.document["results"][0]["history"]
    assert [int(line) for line in (tmp_path / "seen").read_text().splitlines()] == [point["steps"] for point in history]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ("--tracker mine.py does not exist",)),
        ("x = 1", ("defines no `track`", "expected `def track(step")),
        ("def track(", ("mine.py, line 1: SyntaxError",)),
        ("def track(step, scalars):\n    raise KeyError(step)", ("mine.py, line 2: KeyError: 0",)),
    ],
)
def test_a_tracker_that_cannot_be_used_is_one_line(gossamer, quick, tmp_path, text, words):
    if text is not None:
        (tmp_path / "mine.py").write_text(text + "\n")
    gossamer(*quick, "--tracker", "mine.py").refused(*words)


def test_a_board_that_cannot_be_written(gossamer, quick, tmp_path):
    (tmp_path / "taken").write_text("")
    gossamer(*quick, "--tensorboard", "taken").refused("--tensorboard taken cannot be written to")
    gossamer(*quick, "--tensorboard", "").refused("--tensorboard is empty")
