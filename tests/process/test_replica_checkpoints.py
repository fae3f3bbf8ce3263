"""Checkpoints of replicas in a loop of one's own, and ``examples/llm.py``, which writes them and resumes from them."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from real_workers import RealWorkers
from replica_checkpoint_script import load, save
from replica_script import run_example


def tensors_of(folder):
    """All tensors in a checkpoint that ``torch.distributed.checkpoint`` wrote, whole, by their names."""
    about = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in about.items()
        if hasattr(entry, "size")
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_replicas_start_from_the_mean_of_those_that_were_saved_whatever_their_shards(tmp_path):
    with RealWorkers(4, script=save, shape=(2, 2), folder=str(tmp_path)) as ranks:
        ranks.finished()
    first, second = (tensors_of(tmp_path / f"replica-{replica}") for replica in range(2))
    assert any("exp_avg_sq" in name for name in first)
    mean = {name: (tensor.double() + second[name].double()) / 2 for name, tensor in first.items()}
    assert not all(torch.allclose(first[name].double(), tensor) for name, tensor in mean.items())
    wrong = {
        "load_mean got no folder": [],
        "nowhere cannot be loaded: ": [str(tmp_path / "nowhere")],
        "other cannot be loaded: Missing key in checkpoint state_dict: ": [str(tmp_path / "other")],
    }
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    for shape in ((1, 3), (3, 1)):
        with RealWorkers(3, script=load, shape=shape, folder=str(tmp_path), wrong=list(wrong.values())) as ranks:
            reports = ranks.finished()
        for report in reports:
            assert all(words in line for words, line in zip(wrong, report["lines"], strict=True)), report["lines"]
            assert report["tensors"].keys() == mean.keys()
            for name, values in report["tensors"].items():
                torch.testing.assert_close(
                    torch.tensor(values).double().reshape(mean[name].shape), mean[name], atol=1e-7, rtol=1e-6
                )
            assert report["lr"] == 0.05


LLM = Path(__file__).parents[2] / "examples" / "llm.py"


def held_out(folder, steps, *options, count=2):
    """The loss on held-out text of a short training, the same on all ranks."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}.\n" for number in range(400)))
    small = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--period", "4")
    arguments = [str(text), *small, "--steps", str(steps), *options]
    with RealWorkers(count, script=run_example, example=str(LLM), arguments=arguments) as ranks:
        printed = "".join(report["printed"] for report in ranks.finished())
    losses = re.findall(r"rank \d: loss on held-out text ([0-9.]+)", printed)
    assert losses == losses[:1] * count
    return float(losses[0])


def test_the_llm_example_trains_and_resumes_where_it_was(tmp_path):
    # The average that is started after step 8 arrives after step 9: the checkpoint has it in flight.
    options = ("--checkpoint", str(tmp_path / "checkpoint"))
    assert held_out(tmp_path, 8, *options) < 5.5  # as good as knowing nothing
    assert held_out(tmp_path, 12, *options) == held_out(tmp_path, 12)


@pytest.mark.parametrize(("replicas", "count"), [("1", 3), ("3", 3)])
def test_the_llm_example_resumes_with_other_numbers_of_replicas_and_ranks(replicas, count, tmp_path):
    options = ("--method", "localsgd", "--checkpoint", str(tmp_path / "checkpoint"))
    saved = held_out(tmp_path, 8, *options, count=4)
    # No step is left to make: what is evaluated is the mean of the replicas in the checkpoint.
    resumed = held_out(tmp_path, 8, *options, "--replicas", replicas, count=count)
    assert resumed == pytest.approx(saved, abs=2e-3)
    assert held_out(tmp_path, 16, *options, "--replicas", replicas, count=count) < saved
    assert len(list((tmp_path / "checkpoint").glob("replica-*"))) == int(replicas)


@pytest.mark.parametrize("method", ["a2cid2", "noloco"])
def test_the_llm_example_trains_with_a_method_that_does_not_wait(method, tmp_path):
    options = ("--checkpoint", str(tmp_path / "checkpoint"), "--method", method)
    assert held_out(tmp_path, 8, *options, count=4) < 5.5
    assert held_out(tmp_path, 16, *options, count=4) < 5.3
