"""``--out``: what a run leaves on disk, and ``--config``: how it is given back."""

import json
import os
import tomllib

import pytest
import torch
from safetensors.torch import load_file

FILES = {"run.json", "config.toml", "metrics.jsonl", "recording.json", "model.safetensors", "summary.json"}


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_folder_of_a_run(gossamer, tmp_path):
    ran = gossamer(
        *("simulate", "--workers", "3", "--steps", "4", "--batch", "8", "--method", "overlap", "--model", "conv"),
        *("--out", "runs/first", "--json"),
    )
    folder = tmp_path / "runs" / "first"
    assert names(folder) == FILES
    (result,) = ran.document["results"]
    history = result.pop("history")
    assert json.loads((folder / "summary.json").read_text()) == result
    assert [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] == history
    config = tomllib.loads((folder / "config.toml").read_text())
    assert (config["method"], config["workers"], config["model"], config["global_every"]) == ("overlap", 3, "conv", 0)
    assert (folder / "config.toml").read_text().startswith("# gossamer simulate --workers 3 ")


def test_the_weights_are_the_models_own(gossamer, tmp_path):
    from gossamer import tasks

    gossamer("simulate", "--workers", "2", "--steps", "2", "--model", "conv", "--out", "run")
    weights = load_file(tmp_path / "run" / "model.safetensors")
    config = tasks.TaskConfig(model="conv")
    model = tasks.build("digits", workers=2, seed=0, config=config).model()
    state = model.state_dict()
    model.load_state_dict(weights)
    for name, weight in weights.items():
        assert weight.shape == state[name].shape
        assert torch.isfinite(weight).all()


def test_several_methods_have_a_folder_each(gossamer, quick, tmp_path):
    gossamer(*quick, "--method", "gossip,lasgd", "--out", "run")
    assert names(tmp_path / "run") == {"gossip", "lasgd", "summary.json"}
    for method in ("gossip", "lasgd"):
        assert names(tmp_path / "run" / method) == FILES
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [result["method"] for result in summary["results"]] == ["gossip", "lasgd"]


def test_a_run_is_never_written_over(gossamer, quick, tmp_path):
    gossamer(*quick, "--method", "gossip,lasgd", "--out", "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    gossamer(*quick, "--out", "run").refused("run already contains a run")
    gossamer(*quick, "--out", "run/lasgd").refused("run/lasgd already contains a run")
    (tmp_path / "run" / "summary.json").unlink()
    # As after a crash: found before the first method is trained.
    gossamer(*quick, "--method", "allreduce,lasgd", "--out", "run").refused("run/lasgd already contains a run")
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == {path: content for path, content in before.items() if path != tmp_path / "run" / "summary.json"}


@pytest.mark.parametrize("wrong", ["--straggler=9:2", "--slow-link=0-9:1mbit", "--nodes=3"])
def test_settings_that_cannot_be_used_leave_no_folder(gossamer, quick, tmp_path, wrong):
    gossamer(*quick, "--out", "run", wrong).refused()
    gossamer(*quick, "--method", "gossip,lasgd", "--out", "run", wrong).refused()
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_way(gossamer, quick, tmp_path):
    (tmp_path / "taken").write_text("mine")
    gossamer(*quick, "--out", "taken").refused("taken is a file")
    gossamer(*quick, "--out", "taken/run").refused("taken/run cannot be created")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(gossamer, quick, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    gossamer(*quick, "--out", "locked").refused("locked cannot be written to")
    gossamer(*quick, "--out", "locked/run").refused("locked/run cannot be created")


def test_a_full_disk_is_one_line(gossamer, quick, monkeypatch):
    def replace(path, write):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gossamer.runs.run_folder._replace", replace)
    outcome = gossamer(*quick, "--out", "run")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("gossamer: --out run cannot be written to: No space left on device")


CONFIGS = {
    "flat, with underscores": 'method = "gossip"\nworkers = 3\nweight_decay = 0.1\nrate = 2\n',
    "flat, with dashes": 'method = "gossip"\nworkers = 3\nweight-decay = 0.1\nrate = 2.0\n',
    "with tables": '[run]\nmethod = "gossip"\nworkers = 3\n[optimizer]\nweight-decay = 0.1\n[gossip]\nrate = 2\n',
}


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_config_sets_options_by_their_names(gossamer, tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    gossamer("simulate", "--config", "run.toml", "--task", "quadratic", "--steps", "2", "--out", "run")
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (config["method"], config["workers"], config["weight_decay"], config["rate"]) == ("gossip", 3, 0.1, 2.0)


def test_options_win_over_the_file_and_lists_are_commas(gossamer, tmp_path):
    (tmp_path / "run.toml").write_text('task = "quadratic"\nmethod = ["gossip", "lasgd"]\nworkers = 9\nsteps = 2\n')
    ran = gossamer("simulate", "--config", "run.toml", "--workers", "3", "--json")
    assert [(result["method"], result["workers"]) for result in ran.document["results"]] == [
        ("gossip", 3),
        ("lasgd", 3),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("methdo = 'gossip'", ("run.toml", "unknown option methdo", "did you mean method?")),
        ("[run]\nzzz = 1", ("unknown option zzz", "--help")),
        ("method = gossip", ("run.toml is not TOML",)),
        ("workers = 'many'", ("--workers is 'many'",)),
        ("workers = 2.5", ("--workers is 2.5",)),
        ("workers = true", ("--workers is True",)),
        ("lr = 2024-01-01", ("lr is not a plain value",)),
        ("[run.method]\nx = 1", ("method is not a plain value",)),
        ("[a]\nlr = 1\n[b]\nlr = 2", ("lr is given twice",)),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line(gossamer, tmp_path, text, words):
    (tmp_path / "run.toml").write_text(text + "\n")
    gossamer("simulate", "--config", "run.toml", "--json").refused(*words)


def test_a_config_that_is_a_folder_or_not_text(gossamer, tmp_path):
    (tmp_path / "folder").mkdir()
    gossamer("simulate", "--config", "folder").refused("folder cannot be read")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    gossamer("simulate", "--config", "binary.toml").refused("binary.toml is not TOML")


@pytest.mark.parametrize(
    "options",
    [
        "--task quadratic --method a2cid2 --rate 2 --noise 0.1",
        "--task digits --method divisible --clip 5 --epochs 0.1 --partition dirichlet:0.3",
        "--task quadratic --method overlap --clock ideal --optimizer AccumAdamW",
        "--task quadratic --method lasgd --straggler 1:3 --fail 0@0.1 --compute constant:9ms",
    ],
)
def test_a_folders_own_config_gives_the_run_again(gossamer, tmp_path, options):
    def figures(*given):
        (result,) = gossamer("simulate", *given, "--json").document["results"]
        for point in (result, *result["history"]):
            del point["wall_s"]
        return result

    first = figures(*options.split(), "--workers", "3", "--steps", "12", "--seed", "5", "--out", "run")
    assert figures("--config", "run/config.toml", "--out", "again") == first
    before, after = (tomllib.loads((tmp_path / name / "config.toml").read_text()) for name in ("run", "again"))
    assert before == after


def test_a_strange_command_line_does_not_spoil_the_config(gossamer, quick, tmp_path):
    gossamer(*quick, "--straggler", "\n1:2,\t2:3", "--out", "run")
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["straggler"] == "\n1:2,\t2:3"
