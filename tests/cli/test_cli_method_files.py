"""Methods from the user's own files: on the command line, in run folders, in worker processes and in the planner."""

import json
import tomllib

import pytest
import torch
from method_files import BLEND, HEAD, PAIRS, method_class
from safetensors.torch import load_file

from gossamer.plan import cluster_file
from gossamer.plan.runtime_model import replay
from gossamer.plan.runtime_model.cluster_model import ClusterModel

QUADRATIC = ("--task", "quadratic", "--dim", "8", "--lr", "0.05", "--workers", "3", "--steps", "12")
NAMED = '    name = "mine"\n    summary = ""\n'
CLUSTER = '[cluster]\nnodes = 4\nworkers_per_node = 1\n[compute]\nstep = "60ms"\n[links]\nbetween = "5gbit/50us"\n'


@pytest.fixture(autouse=True)
def files(tmp_path):
    (tmp_path / "blend.py").write_text(BLEND)
    (tmp_path / "pairs.py").write_text(PAIRS)
    (tmp_path / "both.py").write_text(BLEND + PAIRS.replace("from gossamer import MethodConfig\n", ""))
    (tmp_path / "cluster.toml").write_text(CLUSTER)


def model(folder):
    return torch.cat([tensor.flatten() for tensor in load_file(folder / "model.safetensors").values()])


def results(outcome):
    assert outcome.code == 0, outcome.err
    return outcome.document["results"]


def test_methods_of_files_and_of_the_table_are_compared(gossamer, tmp_path):
    methods = "blend.py, localsgd,pairs.py:Pairs"
    runs = results(gossamer("simulate", *QUADRATIC, "--method", methods, "--period", "1", "--out", "out", "--json"))
    assert [run["method"] for run in runs] == ["blend", "localsgd", "pairs"]
    torch.testing.assert_close(model(tmp_path / "out" / "blend"), model(tmp_path / "out" / "localsgd"))
    assert runs[2]["exchanges"] > 0


def test_its_settings_are_options(gossamer):
    full, half = (
        results(gossamer("simulate", *QUADRATIC, "--method=blend.py", "--strength", strength, "--json"))[0]
        for strength in ("1", "0.5")
    )
    assert full["consensus"] < 1e-6 < half["consensus"]
    shown = " ".join(gossamer("simulate", "--method", "blend.py", "--help").out.split())
    assert "--strength X share of the way to the mean (default: blend 1.0)" in shown
    assert "--offset N (default: blend 0)" in shown
    shared = " ".join(gossamer("train", "--method", "pairs.py", "--help").out.split())
    assert "--rate X exchanges per worker and gradient (default: a2cid2 1.0, gossip 1.0, pairs 1.0)" in shared
    gossamer("simulate", *QUADRATIC, "--method", "blend.py", "--strength", "2").refused(
        "--strength is 2.0", "1 or less"
    )
    gossamer("simulate", *QUADRATIC, "--method", "blend.py", "--rate", "2").refused("--rate does not apply to blend")
    gossamer("simulate", *QUADRATIC, "--method", "gossip", "--strength", "1").refused("unknown option --strength")


def test_the_run_folder_records_the_file_and_reproduces_the_run(gossamer, tmp_path, monkeypatch):
    command = ("simulate", *QUADRATIC, "--method", "blend.py", "--strength", "0.5", "--out", "first")
    assert gossamer(*command).code == 0
    config = tomllib.loads((tmp_path / "first" / "config.toml").read_text())
    assert config["method"] == f"{tmp_path / 'blend.py'}:Blend"
    assert config["strength"] == 0.5
    assert json.loads((tmp_path / "first" / "run.json").read_text())["method"] == "blend"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert gossamer("simulate", "--config", "../first/config.toml", "--out", "second").code == 0
    assert torch.equal(model(tmp_path / "first"), model(tmp_path / "elsewhere" / "second"))
    document = gossamer("report", "../first", "second", "--json").document
    assert {run["method"] for run in document["runs"]} == {"blend"}


def test_a_config_file_may_hold_its_settings(gossamer, tmp_path):
    (tmp_path / "run.toml").write_text('[method]\nstrength = 0.5\n[run]\nmethod = ["blend.py", "gossip"]\nrate = 2.0\n')
    runs = results(gossamer("simulate", *QUADRATIC, "--config", "run.toml", "--json"))
    assert [run["method"] for run in runs] == ["blend", "gossip"]
    (tmp_path / "part.toml").write_text("strength = 0.5\n")
    named = results(gossamer("simulate", *QUADRATIC, "--config", "part.toml", "--method", "blend.py", "--json"))
    assert named[0]["consensus"] == runs[0]["consensus"]
    gossamer("simulate", *QUADRATIC, "--config", "part.toml").refused("unknown option strength")


def test_real_workers_load_the_file_and_give_what_virtual_ones_give(gossamer, tmp_path):
    methods = ("--method", "blend.py,pairs.py", "--strength", "0.5", "--compute", "5ms")
    real = results(gossamer("train", *QUADRATIC, *methods, "--out", "real", "--json"))
    virtual = results(gossamer("simulate", *QUADRATIC, *methods, "--out", "virtual", "--json"))
    torch.testing.assert_close(
        model(tmp_path / "real" / "blend"), model(tmp_path / "virtual" / "blend"), rtol=1e-5, atol=1e-6
    )
    assert [run["method"] for run in real] == ["blend", "pairs"]
    for ours, theirs in zip(real, virtual, strict=True):
        assert ours["total_steps"] == theirs["total_steps"] == 36
    assert real[0]["exchanges"] == virtual[0]["exchanges"] == 12
    assert real[1]["exchanges"] > 0


def test_a_run_with_a_method_of_a_file_is_resumed_from_anywhere(gossamer, tmp_path, monkeypatch):
    settings = ("--method", "blend.py", "--strength", "0.5")
    whole = ("train", *QUADRATIC, *settings, "--out", "whole", "--json")
    half = ("train", *QUADRATIC, *settings, "--steps", "6", "--out", "half", "--checkpoint-every", "6", "--json")
    assert gossamer(*whole).code == gossamer(*half).code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    other = gossamer("train", "--resume", "../half", "--method", "../pairs.py", "--steps", "12")
    other.refused("--method is ", "pairs.py:Pairs", "was run with", "blend.py:Blend")
    assert "--strength X" in gossamer("train", "--resume", "../half", "--help").out
    again = ("train", "--resume", "../half", "--method", "../blend.py", "--strength", "0.5", "--steps", "12", "--json")
    assert results(gossamer(*again))[0]["steps"] == 12
    torch.testing.assert_close(model(tmp_path / "half"), model(tmp_path / "whole"), rtol=1e-5, atol=1e-6)
    (tmp_path / "blend.py").unlink()
    gossamer("train", "--resume", "../half", "--steps", "20").refused("blend.py does not exist")


def test_the_planner_runs_a_method_of_a_file(gossamer, tmp_path):
    plan = ("plan", "--cluster", "cluster.toml", "--parameters", "1e7", "--topology", "ring")
    document = gossamer(*plan, "--method", "blend.py,pairs.py,allreduce", "--json").document
    rows = {row["method"]: row for row in document["ranking"]}
    blend, pairs = rows["blend"], rows["pairs"]
    # Compute, and then an all-reduce of 40 MB in a ring of four: six messages of 10 MB over 625 MB/s.
    assert blend["step_s"] == pytest.approx(0.06 + 6 * (0.016 + 5e-5), rel=1e-3)
    assert blend["bytes_per_step"] == pytest.approx(60e6, rel=1e-3)
    assert blend["bound_by"] == "inter-node bandwidth"
    assert blend["contraction"] == 0.0
    # It is gossip in other words.
    model = ClusterModel(cluster_file.read(tmp_path / "cluster.toml"), 10_000_000, num_runs=1)
    gossip = replay.forecast(model, "gossip", "ring", {})
    assert pairs["step_s"] == pytest.approx(gossip.step_s[0], rel=1e-6)
    assert pairs["bytes_per_step"] == pytest.approx(gossip.bytes_per_step, rel=1e-6)
    assert pairs["contraction"] == pytest.approx(gossip.contraction, rel=1e-3)
    assert pairs["memory_bytes"] == 3 * 4 * 10_000_000
    alone = gossamer(*plan, "--method", "pairs.py", "--json").document
    assert "--method pairs.py --topology ring" in alone["command"]
    assert "Take pairs over ring" in alone["verdict"]


def test_methods_describes_the_method_of_a_file(gossamer):
    shown = gossamer("methods", "blend.py")
    assert shown.code == 0
    for words in (
        "Moves a part of the way to the mean of all workers",
        "The class's own words.",
        "step yields Mean, Update",
        "workers wait for each other: yes",
        "from blend.py",
        "--strength: share of the way to the mean (default: 1.0)",
    ):
        assert words in shown.out
    (row,) = gossamer("methods", "both.py:Pairs", "--json").document["methods"]
    assert row == {
        "method": "pairs",
        "summary": "averages with one neighbour at a time",
        "waits": False,
        "from": "both.py",
        "options": {"rate": 1.0},
        "yields": {"background": ["Pair", "Swap"]},
    }


def test_a_base_class_without_a_name_is_no_second_method(gossamer, tmp_path):
    (tmp_path / "derived.py").write_text(
        HEAD + method_class("Base", "    strength = 0.5\n") + method_class("Mine", NAMED, base="Base")
    )
    assert gossamer("methods", "derived.py", "--json").document["methods"][0]["method"] == "mine"


def test_a_file_that_has_changed_is_loaded_again(gossamer, tmp_path):
    for summary in ("first", "other"):
        (tmp_path / "mine.py").write_text(HEAD + method_class(body=f'    name = "mine"\n    summary = "{summary}"\n'))
        assert gossamer("methods", "mine.py", "--json").document["methods"][0]["summary"] == summary


@pytest.mark.parametrize(
    ("spec", "text", "words"),
    [
        ("none.py", None, ("method file none.py does not exist", "gossamer.Method")),
        ("none.py:Mine", None, ("method file none.py does not exist",)),
        ("mine.py", "x = 1\n", ("mine.py defines no method",)),
        ("mine.py", "from gossamer.methods.gossip import Gossip\n", ("defines no method", "none that is imported")),
        ("both.py", None, ("both.py defines several methods (Blend, Pairs)", "both.py:Blend")),
        ("both.py:Blnd", None, ("unknown method in both.py 'Blnd'", "'Blend'?")),
        ("both.py:", None, ("both.py defines several methods",)),
        ("mine.py:helper", "def helper():\n    pass\n", ("helper in mine.py is a function", "gossamer.Method")),
        ("mine.py:Mine", "class Mine:\n    pass\n", ("Mine in mine.py is the class Mine", "gossamer.Method")),
        ("mine.py", "x = 1\nimport no_such_module\n", ("mine.py, line 2: ModuleNotFoundError",)),
        ("mine.py", "x = 1\n\ndef f(:\n", ("mine.py, line 3: SyntaxError",)),
        ("mine.py", "import sys\nsys.exit(3)\n", ("mine.py, line 2: SystemExit: 3",)),
        ("mine.py", HEAD + method_class(body="    summary = ''\n"), ("method Mine has no name",)),
        ("mine.py", HEAD + method_class(body="    name = 'a/b'\n    summary = ''\n"), ("the name 'a/b'",)),
        ("mine.py", HEAD + method_class(body="    name = 'mine'\n"), ("method mine has no summary",)),
        (
            "mine.py",
            HEAD + method_class(body=NAMED + "    def step(self, worker):\n        yield Update()\n"),
            ("step of method mine does not say which effects it yields", "@yields"),
        ),
        (
            "mine.py",
            HEAD + method_class(body=NAMED + "    @yields(Pair)\n    def step(self, worker):\n        yield\n"),
            ("step of method mine declares Pair",),
        ),
        (
            "mine.py",
            HEAD + method_class(body=NAMED + "    def __init__(self, config, topology):\n        config.rate\n"),
            ("mine.py, line 7: AttributeError", "rate"),
        ),
        (
            "mine.py",
            "import abc\n" + HEAD + "class Mine(Method, abc.ABC):\n" + NAMED
            + "    @abc.abstractmethod\n    def part(self):\n        pass\n",
            ("mine.py: TypeError", "abstract", "part"),
        ),
        ("mine.py", HEAD + method_class(body=NAMED + "    Config = 3\n"), ("Config of method mine is 3", "Config")),
        ("blend.py,blend.py", None, ("blend, blend", "each method once")),
        ("blend.py,mine.py", BLEND, ("blend, blend", "its own name")),
        ("auto,blend.py", None, ("unknown method 'auto'",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["simulate", "train", "plan", "probe"])
def test_a_file_that_cannot_be_used_is_one_line(gossamer, tmp_path, command, spec, text, words):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    rest = ("--cluster", "cluster.toml", "--parameters", "1e6") if command == "plan" else QUADRATIC
    gossamer(command, "--method", spec, *rest).refused(*words)


OPTION = "from dataclasses import dataclass\nfrom gossamer import MethodConfig\n"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("class C(MethodConfig):\n    rate: float = 1.0\n", ("is not a dataclass", "@dataclass(frozen=True")),
        (
            "@dataclass(frozen=True, kw_only=True)\nclass C(MethodConfig):\n    rate: float\n",
            ("rate without a default",),
        ),
        (
            "@dataclass(frozen=True, kw_only=True)\nclass C(MethodConfig):\n    rate: float | None = None\n",
            ("rate of type float | None", "int, float, str or bool"),
        ),
        (
            "@dataclass(frozen=True, kw_only=True)\nclass C(MethodConfig):\n    rate: 'Missing' = 1\n",
            ("a type that does not exist", "Missing"),
        ),
        (
            "@dataclass(frozen=True, kw_only=True)\nclass C(MethodConfig):\n    lr: float = 1.0\n",
            ("an option lr, as every run has",),
        ),
        (
            "@dataclass(frozen=True, kw_only=True)\nclass C(MethodConfig):\n    out: str = ''\n",
            ("--out is an option of gossamer simulate",),
        ),
    ],
)
def test_options_that_cannot_be_options_are_refused(gossamer, tmp_path, config, words):
    (tmp_path / "mine.py").write_text(HEAD + OPTION + config + method_class(body=NAMED + "    Config = C\n"))
    gossamer("simulate", "--method", "mine.py", *QUADRATIC).refused(*words)
