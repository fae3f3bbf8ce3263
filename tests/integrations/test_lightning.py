"""Two workers with the real Lightning."""

import re

import pytest

# The first test waits for the workers of all; on a busy machine they take their time.
pytestmark = pytest.mark.timeout(320)


@pytest.fixture(scope="module")
def run(launch):
    return launch("lightning_worker.py", "lightning")


def test_the_example_ends_with_one_model(run):
    _, _, printed = run
    lines = re.findall(r"worker (\d) of 2: (\d+) steps, (\d+) exchanges, accuracy ([\d.]+), weights (\S+)", printed)
    assert sorted(line[0] for line in lines) == ["0", "1"]
    assert {line[1] for line in lines} == {"90"}
    assert len({line[3:] for line in lines}) == 1
    assert float(lines[0][3]) > 0.85


@pytest.mark.parametrize("method", ["allreduce", "gossip"])
def test_workers_share_the_data_and_end_alike(run, method):
    _, reports, _ = run
    first, second = (report[method] for report in reports)
    assert (first["rank"], second["rank"], first["workers"]) == (0, 1, 2)
    # Two epochs of forty points, shuffled, every one dealt to one of the workers.
    for epoch in range(2):
        dealt = [report["trained_on"][20 * epoch : 20 * (epoch + 1)] for report in (first, second)]
        assert sorted(dealt[0] + dealt[1]) == list(range(40))
    assert first["trained_on"][:20] != first["trained_on"][20:]
    # Five batches make three steps per epoch, two batches each.
    assert first["steps"] == second["steps"] == 6
    if method == "allreduce":
        assert first["exchanges"] == second["exchanges"] == 6
    assert first["weights"] == second["weights"]
    # Validation data is not dealt out, and a logged score is the mean over the workers.
    assert first["validated_on"] == second["validated_on"] == 2 * list(range(7))
    assert first["mean_of_ranks"] == second["mean_of_ranks"] == 0.5


def test_gradients_are_there_before_they_are_averaged(run):
    _, reports, _ = run
    first, second = (report["allreduce"] for report in reports)
    assert first["before_the_end"] == second["before_the_end"]


def test_the_mean_model_is_validated(run):
    _, reports, _ = run
    first, second = (report["gossip"] for report in reports)
    assert first["validated_with"] == second["validated_with"]
    assert first["before_the_end"] != second["before_the_end"]


def test_several_optimizers_are_refused(run):
    _, reports, _ = run
    assert all("2 optimizers: Gossamer expects one" in report["refused"] for report in reports)


def test_workers_log_gather_and_decide_together(run):
    out, reports, _ = run
    first, second = (report["together"] for report in reports)
    assert first == {**second, "steps": first["steps"]}
    assert first["logged"] == {"mean": 0.5, "sum": 1, "max": 1, "min": 0}
    assert first["gathered"] == {"a": [[0, 10], [1, 11]], "b": [0, 1]}
    # Rank 0's score does not rise, so both stop after their second epoch; an epoch of rank 1 is shorter.
    assert first["epochs"] == 2
    assert (first["steps"], second["steps"]) == (10, 2)
    # Rank 0 names the folder, and is the only one to write.
    assert first["folder"] == str(out / "of rank 0")
    assert len(list((out / "of rank 0").iterdir())) == 1
    assert not (out / "of rank 1").exists()


def test_a_worker_that_is_done_is_not_waited_for(run):
    _, reports, _ = run
    first, second = (report["uneven"] for report in reports)
    assert (second["gathered"], second["mean"]) == ([0, 1], 0.5)
    assert (first["gathered"], first["mean"]) == ([0], 0)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("typo", "did you mean 'validate_mean'?"),
        ("gradients", "sync_grads=True would need gradients of other workers: leave it out"),
        ("object", "cannot send a value of type object"),
    ],
)
def test_a_mistake_is_told_in_one_line(run, mistake, said):
    _, reports, _ = run
    assert all(said in report[mistake] for report in reports)
