"""Two workers with the real Trainer of transformers."""

import re

import pytest
from safetensors.torch import load_file

# The first test waits for the workers of all; on a busy machine they take their time.
pytestmark = pytest.mark.timeout(320)


@pytest.fixture(scope="module")
def run(launch):
    return launch("hf_worker.py", "transformers", "accelerate")


def test_the_example_ends_with_one_model(run):
    out, _, printed = run
    lines = re.findall(r"worker (\d): 40 steps, (\d+) exchanges, loss ([\d.]+), weights (\S+)", printed)
    assert sorted(line[0] for line in lines) == ["0", "1"]
    assert len({line[2:] for line in lines}) == 1
    # Guessing costs log 32, which is 3.47.
    assert float(lines[0][2]) < 3.0
    assert (out / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize("method", ["allreduce", "gossip"])
def test_workers_share_the_data_and_end_alike(run, method):
    _, reports, _ = run
    first, second = (report[method] for report in reports)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert not first["wrapped"]
    assert sorted(first["trained_on"][:20] + second["trained_on"][:20]) == list(range(40))
    assert first["steps"] == second["steps"] == 10
    if method == "allreduce":
        assert first["exchanges"] == second["exchanges"] == 10
    assert first["weights"] == second["weights"]
    assert (first["before_the_end"] == second["before_the_end"]) == (method == "allreduce")


def test_one_worker_saves(run):
    out, reports, _ = run
    assert [report["gossip"]["saves"] for report in reports] == [True, False]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["checkpoint-10", "checkpoint-5"]
    # While training, the parameters share one storage; all of them are saved nevertheless.
    assert load_file(out / "checkpoints" / "checkpoint-5" / "model.safetensors").keys() == {"net.weight", "net.bias"}


def test_a_trainer_that_wraps_the_model_itself_is_refused(run):
    _, reports, _ = run
    assert all("inside 'with gossamer.integrations.hf.alone():'" in report["not alone"] for report in reports)


def test_a_misspelt_option_is_named_before_training_begins(run):
    _, reports, _ = run
    assert all("did you mean 'topology'?" in report["typo"] for report in reports)
