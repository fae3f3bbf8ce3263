"""The run folder, the tracker and the trace of a loop of one's own, with real workers."""

import contextlib
import json
import signal
import threading
import time

import output_script
import pytest
import torch
from real_workers import RealWorkers
from safetensors.torch import load_file
from torch import nn

import gossamer
from gossamer.report.document import report_document
from gossamer.report.runs import read_run
from gossamer.report.server import LiveReport, ReportServer
from gossamer.runs import monitor_role


def shown(folder):
    """What the page shows of the run."""
    document = report_document([read_run(folder)])
    return document["runs"][0] | {"headline": document["headline"]}


def until(condition, within_s=60.0):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.1)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith(("}", "]"))]


def test_two_workers_leave_a_run_folder(tmp_path):
    folder, tracked = tmp_path / "run", tmp_path / "tracked.jsonl"
    order = {"steps": 40, "averaged": True, "final": 0.75, "tracked": str(tracked)}
    with RealWorkers(2, script=output_script.train, join={"out": folder, "trace": True}, **order) as workers:
        first, second = workers.finished()
    # On a busy machine exchanges may be few.
    assert {kind for end in (first, second) for kind, _ in end["events"]} <= {gossamer.EventKind.FEW_EXCHANGES}
    run = shown(folder)
    assert (run["world"], run["finished"], run["notes"], run["method"]) == ("process", True, [], "gossip")
    assert run["headline"].startswith("gossip reached 75% accuracy after")
    assert (run["config"]["workers"], run["config"]["optimizer"], run["config"]["rate"]) == (2, "SGD", 1.0)
    assert sum(run["workers"]["steps"]) == run["summary"]["total_steps"] == 80
    # In the averaged block, then after the end.
    accuracies = [value for value in run["curves"]["accuracy"] if value is not None]
    assert accuracies[-1] == 0.75
    assert [value for value in run["curves"]["loss"] if value is not None][-1] == 1.5
    assert run["curves"]["worker_accuracy_mean"][-1] > 0.5
    # A mean over the steps since the last point, at first over four classes that nobody knows.
    assert 0 < run["curves"]["train_loss"][-1] < 1.3
    model = load_file(folder / "model.safetensors")
    for name, value in first["weights"].items():
        assert torch.equal(model[name], torch.tensor(value)), name
    assert first["weights"] == second["weights"]
    for rank in range(2):
        last = lines(folder / "workers" / f"{rank}.jsonl")[-1]
        assert (last["state"], last["steps"], last["loss_count"]) == ("done", 40, 40)
        assert last["logged"] == {"temperature": 20 + rank}
    steps = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["name"] == "step"]
    assert len(steps) == 80
    calls = lines(tracked)
    assert len({process for process, _, _ in calls}) == 1
    figures = calls[-1][2]
    assert (figures["temperature/worker_0"], figures["temperature/worker_1"]) == (20, 21)
    assert (figures["accuracy"], figures["worker_steps/worker_1"]) == (0.75, 40)


def test_the_page_is_live_and_shows_a_worker_that_was_killed_and_came_back(tmp_path, browser):
    folder, stop = tmp_path / "run", tmp_path / "stop"
    order = {"join": {"out": folder}, "steps": 100_000, "until": str(stop), "final": 0.9}
    with RealWorkers(2, script=output_script.train, **order) as workers:
        workers[0].step(20)
        until((folder / "run.json").exists)
        with ReportServer(LiveReport(folder), "127.0.0.1", 0) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            page = browser.new_page()
            errors = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(server.url)
            page.wait_for_selector("html[data-drawn]", timeout=60_000)
            live = page.locator("#live-text")
            until(lambda: live.text_content().startswith("step "))
            begun = live.text_content()
            workers.kill(1)
            until(lambda: "worker 1 gone" in page.inner_text("body"))
            page.screenshot(path=str(tmp_path / "live.png"), full_page=True)
            workers.restart(1).step(10)
            # The monitor says that it started again, the worker itself that it came back: whichever is shown first.
            back = ("worker 1 started again", "came back: taking over from the others")
            until(lambda: any(text in page.inner_text("body") for text in back), 150.0)
            assert live.text_content() != begun
            stop.touch()
            workers.finished()
            until(lambda: live.text_content() == "finished")
            assert "90% accuracy" in page.locator("h1").text_content()
            page.screenshot(path=str(tmp_path / "finished.png"), full_page=True)
            page.close()
            server.shutdown()
        assert errors == []
    run = shown(folder)
    assert run["notes"] == []
    dead = run["workers"]["time"]["dead"]
    assert dead[0] == 0
    assert dead[1] > 0
    assert (folder / "workers" / "1.1.recording.json").exists()
    # All on one clock: nothing was recorded before a worker knew when the run began.
    assert run["workers"]["until"] < run["summary"]["time"] + 30


def test_another_worker_monitors_if_the_first_dies_and_history_goes_on(tmp_path):
    folder, stop = tmp_path / "run", tmp_path / "stop"
    order = {"join": {"out": folder}, "steps": 100_000, "until": str(stop)}
    with RealWorkers(2, script=output_script.train, **order) as workers:
        until(lambda: (folder / "metrics.jsonl").exists() and len(lines(folder / "metrics.jsonl")) > 5)
        # It hosts the store too.
        workers.kill(0)
        known = len(lines(folder / "metrics.jsonl"))
        until(lambda: len(lines(folder / "metrics.jsonl")) > known + 3, monitor_role.TAKE_OVER_S + 60)
        workers.restart(0).step(10)
        until(lambda: "worker 0 started again" in str(shown(folder)["events"]))
        stop.touch()
        workers.finished()
    run = shown(folder)
    assert run["finished"]
    assert run["workers"]["time"]["dead"][0] > 0
    times, steps = run["points"]["time"], run["points"]["steps"]
    assert times == sorted(times)
    assert steps == sorted(steps)
    assert len(times) > known
    # The steps of both processes of worker 0.
    assert run["summary"]["total_steps"] == pytest.approx(sum(run["workers"]["steps"]), abs=200)


def test_ctrl_c_leaves_a_folder_that_says_so(tmp_path):
    folder = tmp_path / "run"
    with RealWorkers(2, script=output_script.train, join={"out": folder}, steps=100_000) as workers:
        for worker in workers:
            worker.step(20)
        # As torchrun does: once to all, and again to those that are leaving.
        for _ in range(2):
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    worker.signal(signal.SIGINT)
            time.sleep(0.1)
        for worker in workers:
            worker.process.join(60)
    run = shown(folder)
    assert run["finished"]
    (note,) = run["notes"]
    assert note.startswith("stopped by hand at step ")
    assert not (folder / "model.safetensors").exists()


def test_the_last_worker_that_leaves_completes_the_folder_of_a_monitor_that_left_before(tmp_path):
    folder = tmp_path / "run"
    with RealWorkers(2, script=output_script.train, join={"out": folder}, steps=100_000) as workers:
        for worker in workers:
            worker.step(20)
        # The store, in which it said that it left, ends with it.
        for worker in workers:
            worker.signal(signal.SIGINT)
            worker.process.join(60)
    run = shown(folder)
    assert run["finished"]
    assert run["notes"][0].startswith("stopped by hand at step ")


@pytest.mark.parametrize("wrong", ["used", "file", "tracker"])
def test_all_workers_refuse_what_cannot_be_written_or_called(tmp_path, wrong):
    folder = tmp_path / "run"
    arguments = {"out": folder}
    if wrong == "used":
        folder.mkdir()
        (folder / "run.json").write_text("{}")
        words = f"out {folder} already contains a run, which would be lost: give another folder, or resume=True"
    elif wrong == "file":
        folder.write_text("")
        words = f"out {folder} is a file"
    else:
        arguments["tracker"] = str(tmp_path / "trakcer.py")
        words = f"worker 0: tracker {tmp_path / 'trakcer.py'} does not exist"
    with RealWorkers(2, script=output_script.train, join=arguments, steps=5) as workers:
        refusals = {worker.at("refused")["why"] for worker in workers}
    assert len(refusals) == 1
    assert words in refusals.pop()
    if wrong == "tracker":
        assert not folder.exists()


# One worker, in this process


@pytest.fixture
def joined():
    """Join with a small model; what is left is closed."""
    swarms = []

    def join(**arguments):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        swarm = gossamer.join(model, optimizer, method="gossip", **arguments)
        swarms.append(swarm)

        def step(count=1):
            for _ in range(count):
                loss = model(torch.ones(1, 3)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                swarm.log(loss=loss)

        return swarm, step

    yield join
    for swarm in swarms:
        swarm.close()


def status_threads():
    return [thread.name for thread in threading.enumerate() if thread.name in ("gossamer-status", "gossamer-monitor")]


def test_without_a_folder_or_a_tracker_no_thread_runs(joined, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    swarm, step = joined()
    step()
    assert status_threads() == []
    swarm.finish()
    assert list(tmp_path.iterdir()) == []
    swarm, step = joined(out="run")
    assert "gossamer-status" in status_threads()
    step()
    swarm.finish()
    assert status_threads() == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": "0.5"}, "log: loss is '0.5': expected a number"),
        ({"loss": None}, "log: loss is None: expected a number"),
        ({"grad": torch.ones(2, 3)}, "log: grad is a tensor of shape (2, 3) and torch.float32"),
        ({"grad": [1.0]}, "log: grad is [1.0]: expected a number"),
        ({"grad": 1j}, "log: grad is 1j: expected a number"),
    ],
)
def test_only_numbers_are_logged(joined, values, words):
    swarm, _ = joined()
    with pytest.raises(gossamer.InputError) as refused:
        swarm.log(**values)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_numbers_of_all_kinds_are_logged(joined, tmp_path):
    import numpy as np

    swarm, step = joined(out=tmp_path / "run")
    step(3)
    swarm.log(a=1, b=np.float32(0.5), c=torch.tensor([2.0], requires_grad=True), d=True, e=float("nan"), f=np.array(3))
    swarm.finish()
    assert lines(tmp_path / "run/workers/0.jsonl")[-1]["logged"] == {
        "a": 1.0, "b": 0.5, "c": 2.0, "d": 1.0, "e": None, "f": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"out": ""}, "out is ''"),
        ({"out": 3}, "out is 3: expected the name of a folder"),
        ({"trace": True}, "trace needs the folder of the run: give one with out=DIR"),
        ({"resume": True}, "resume needs the folder of the run"),
        ({"tracker": "tensorboard"}, "the tracker 'tensorboard' needs the folder of the run"),
        ({"tracker": 3}, "tracker is 3: expected a function track(step, scalars)"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(joined, arguments, words):
    with pytest.raises(gossamer.InputError, match=r"expected|needs") as refused:
        joined(**arguments)
    assert words in str(refused.value)


def test_a_tracker_that_fails_is_said_once_and_training_goes_on(joined, tmp_path):
    calls = []

    def track(step, scalars):
        calls.append(step)
        raise KeyError("project")

    swarm, step = joined(tracker=track)
    until(lambda: len(calls) == 1)
    step(5)
    until(lambda: len(calls) > 1)
    swarm.finish()
    (event,) = swarm.events
    assert event.kind == gossamer.EventKind.NOT_WRITTEN
    assert "the tracker failed: KeyError: 'project'" in str(event)
    assert swarm.metrics().steps == 5


def test_a_folder_that_disappears_is_an_event_and_training_goes_on(joined, tmp_path):
    import shutil

    folder = tmp_path / "run"
    swarm, step = joined(out=folder, trace=True)
    until((folder / "run.json").exists)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    until(lambda: step() or len(swarm.events) > 1)
    swarm.finish()
    assert {event.kind for event in swarm.events} == {gossamer.EventKind.NOT_WRITTEN}
    assert all("cannot be written to" in str(event) and str(folder) in str(event) for event in swarm.events)
    assert len({str(event) for event in swarm.events}) == len(swarm.events) <= 5


def test_an_exception_in_the_loop_is_named(joined, tmp_path):
    swarm, step = joined(out=tmp_path / "run")
    step(3)
    with pytest.raises(ZeroDivisionError), swarm:
        step(1 // 0)
    (note,) = shown(tmp_path / "run")["notes"]
    assert note.startswith(
        "failed: worker 0: ZeroDivisionError: integer division or modulo by zero (test_process_output.py, line "
    )


def test_a_run_is_resumed_in_its_folder(joined, tmp_path):
    folder = tmp_path / "run"
    swarm, step = joined(out=folder)
    until(lambda: step() or len(shown(folder)["points"]["steps"]) > 3 if (folder / "run.json").exists() else step())
    state, at = swarm.state_dict(), swarm.metrics().steps
    until(lambda: step() or shown(folder)["points"]["steps"][-1] > at)
    swarm.close()
    assert "stopped by hand" in shown(folder)["notes"][0]
    before = shown(folder)["points"]
    with pytest.raises(gossamer.InputError, match="resume=True"):
        joined(out=folder)
    swarm, step = joined(out=folder, resume=True)
    swarm.load_state_dict(state)
    step(50)
    swarm.finish()
    run = shown(folder)
    assert (run["finished"], run["notes"], run["summary"]["steps"]) == (True, [], at + 50)
    kept = [count for count in before["steps"] if count <= at]
    assert run["points"]["steps"][: len(kept)] == kept
    assert run["points"]["steps"] == sorted(run["points"]["steps"])
    assert run["points"]["time"][-1] > before["time"][-1]


def test_a_resumed_run_may_end_before_its_monitor_has_begun(tmp_path):
    folder = tmp_path / "run"
    with RealWorkers(2, script=output_script.train, join={"out": folder}, steps=20) as workers:
        workers.finished()
    assert shown(folder)["summary"]["total_steps"] == 40
    order = {"steps": 1, "publishes_late": 1}
    with RealWorkers(2, script=output_script.train, join={"out": folder, "resume": True}, **order) as workers:
        workers.finished()
    run = shown(folder)
    assert (run["finished"], run["notes"], run["summary"]["total_steps"]) == (True, [], 2)
