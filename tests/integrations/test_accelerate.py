"""Two workers in loops with the real Accelerate."""

import re

import pytest
from safetensors.torch import load_file

# The first test waits for the workers of all; on a busy machine they take their time.
pytestmark = pytest.mark.timeout(320)


@pytest.fixture(scope="module")
def run(launch):
    return launch("accelerate_worker.py", "accelerate")


@pytest.fixture(scope="module")
def reports(run):
    return run[1]


def test_the_example_ends_with_one_model(run):
    out, _, printed = run
    lines = re.findall(r"worker (\d) of 2: (\d+) steps, (\d+) exchanges, lr \S+, weights (\S+)", printed)
    assert sorted(line[0] for line in lines) == ["0", "1"]
    assert {line[1] for line in lines} == {"69"}
    assert len({line[3] for line in lines}) == 1
    scores = re.findall(r"epoch (\d): accuracy ([\d.]+) on 360 digits", printed)
    # Only the main process prints, and the score is over the digits of both.
    assert [epoch for epoch, _ in scores] == ["0", "1", "2"]
    assert float(scores[-1][1]) > 0.8
    assert (out / "digits.pt").exists()


@pytest.mark.parametrize("method", ["allreduce", "gossip"])
def test_workers_share_the_data_and_end_alike(reports, method):
    first, second = (report[method] for report in reports)
    for epoch in range(2):
        dealt = [report["trained_on"][24 * epoch : 24 * (epoch + 1)] for report in (first, second)]
        # 11 batches for two workers: the last ones are filled from the start of the epoch.
        assert set(dealt[0]) | set(dealt[1]) == set(range(42))
        assert len(dealt[0]) == len(dealt[1]) == 24
    assert first["trained_on"][:24] != first["trained_on"][24:]
    assert first["steps"] == second["steps"] == 6
    assert first["weights"] == second["weights"]
    assert (first["before_the_end"] == second["before_the_end"]) == (method == "allreduce")


def test_allreduce_is_what_accelerate_does_by_itself(reports):
    for report in reports:
        ours, theirs = report["allreduce"], report["accelerate alone"]
        assert ours["trained_on"] == theirs["trained_on"]
        assert ours["lr"] == pytest.approx(theirs["lr"])
        assert ours["before_the_end"] == pytest.approx(theirs["before_the_end"], abs=1e-6)


def test_what_workers_tell_each_other(reports):
    first, second = (report["told"] for report in reports)
    assert [first.pop(name) for name in ("main", "last", "main_had_been_there")] == [True, False, False]
    assert [second.pop(name) for name in ("main", "last", "main_had_been_there")] == [False, True, True]
    assert (first.pop("share"), second.pop("share")) == (["a", "b"], ["c"])
    # After the end a worker is alone.
    assert (first.pop("alone"), second.pop("alone")) == ([0], [1])
    assert (first.pop("padded"), second.pop("padded")) == ([7, -1], [7, 7])
    assert first == second
    assert first == {
        "gathered": {"a": [0, 1, 10, 11], "b": [0, 1]},
        "ragged": [[0, 0], [1, 1], [1, 1]],
        # Seven samples in batches of two for two workers: what fills the last batch is left out.
        "for_metrics": [4, 5, 6],
        "objects": ["text 0", "text 1"],
        "sum": [10, 12],
        "mean": [5, 6],
        "max": [10, 11],
        "triggered": True,
    }


def test_each_worker_resumes_from_its_own_state(run):
    out, reports, _ = run
    first, second = (report["resumed"] for report in reports)
    assert first["saved"] != second["saved"]
    for report in (first, second):
        assert report["loaded"] == report["saved"]
    assert second["moment"] == pytest.approx(2 * first["moment"])
    # Parameters that share one storage are saved completely.
    assert load_file(out / "checkpoint" / "model.safetensors").keys() == {"weight", "bias"}
    assert load_file(out / "saved" / "model.safetensors").keys() == {"weight", "bias"}


def test_streams_and_samplers_are_dealt_too(reports):
    first, second = (report["loaders"] for report in reports)
    assert (first["stream"], second["stream"]) == ([0, 1, 4, 5], [2, 3, 6, 7])
    assert sorted(first["weighted"] + second["weighted"]) == list(range(40))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("backward", "call prepare(model, optimizer, …) before backward"),
        ("dealt twice", "leave the sampler out"),
        ("fsdp", "fsdp_plugin spreads one model over several workers"),
        ("dispatched", "dispatch_batches=True lets rank 0 read the data"),
        ("typo", "did you mean 'mixed_precision'?"),
        ("typo in an option", "did you mean 'rate'?"),
        ("no method", "Did you mean 'gossip'?"),
        ("not JSON", "cannot send a value of type object to other workers"),
        ("two optimizers", "Gossamer trains one model with one optimizer"),
        ("too late", "create no Accelerator, PartialState or TrainingArguments before"),
    ],
)
def test_a_mistake_is_told_in_one_line(reports, mistake, said):
    for report in reports:
        assert said in report["mistakes"][mistake]
        assert "\n" not in report["mistakes"][mistake]
