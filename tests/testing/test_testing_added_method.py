"""A method in a file of the user's own: every check and every command takes it, and no list has to be touched."""

import json

import pytest

from gossamer.cli import main
from gossamer.testing import CHECKS, check_method

METHOD = '''
"""Averages with all others in every step, all of the way or a part of it."""

from dataclasses import dataclass

from gossamer import Method, MethodConfig
from gossamer.effects import Mean, Update, yields
from gossamer.settings import option
from helper_of_mine import TOPIC


@dataclass(frozen=True, kw_only=True)
class Config(MethodConfig):
    share: float = option(1.0, "share of the way to the mean", above=0, maximum=1)


class Mine(Method):
    name = "mine"
    summary = "averages in every step"
    Config = Config
    uses_topology = False

    def __init__(self, config, topology):
        super().__init__(config, topology)
        self.share = config.share

    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        worker.x.lerp_((yield Mean(worker.x, round=worker.step, topic=TOPIC)), self.share)
'''


@pytest.fixture
def path(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text('TOPIC = "model"\n')
    (tmp_path / "mine.py").write_text(METHOD)
    return tmp_path / "mine.py"


@pytest.fixture
def gossamer(capsys, tmp_path, monkeypatch):
    """Run ``gossamer …`` in the folder of the method."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_it_passes_the_checks_with_its_options(path):
    report = check_method(f"{path}:Mine", share=0.5)
    assert {result.name for result in report.results if result.outcome == "passed"} == CHECKS.keys() - {"replicas"}


def test_commands_take_it(path, gossamer):
    settings = ["--method", "mine.py", "--task", "quadratic", "--dim", 4, "--steps", 10, "--share", 0.5, "--json"]
    for command, workers in (("simulate", 3), ("train", 2)):
        code, out, err = gossamer(command, *settings, "--workers", workers)
        assert code == 0, err
        (run,) = json.loads(out)["results"]
        assert run["method"] == "mine"
        assert run["exchanges"] > 0


def test_the_command_line_checks_it(path, gossamer):
    code, out, _ = gossamer("methods", "mine.py", "--check", "--json")
    outcomes = {check["name"]: check["outcome"] for check in json.loads(out)["checks"]}
    assert code == 0
    assert outcomes["rejoin"] == "passed"
    path.write_text(METHOD.replace("round=worker.step", "round=worker.step + worker.rank"))
    code, out, err = gossamer("methods", "mine.py", "--check")
    assert code == 1
    assert "failed    collectives: nobody can go on: worker 0 waits in step for Mean 'model', round 0" in out
    assert "method mine does not pass all checks" in out
    assert err == ""
    code, _, err = gossamer("methods", "--check")
    assert code == 2
    assert "--check needs a method" in err
