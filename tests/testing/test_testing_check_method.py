"""How ``check_method`` is called, and what it returns."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import faulty_methods as faulty
import pytest

import gossamer
from gossamer.errors import InputError
from gossamer.methods import METHODS
from gossamer.methods.gossip import Gossip, GossipConfig
from gossamer.testing import CHECKS, INVARIANTS, MethodCheckError, check_method
from gossamer.testing.worlds import real_run
from gossamer.topology import build

FAST = ["declaration", "effects", "alone", "mean"]


def build_gossip(topology):
    return Gossip(GossipConfig(rate=2.0), topology)


def test_every_check_has_a_rule_of_one_sentence():
    for check in CHECKS.values():
        assert check.rule.endswith(".")
        assert len(check.rule) < 160
    assert {"mean", "alone"} <= set(INVARIANTS) <= CHECKS.keys()


def test_all_methods_give_up_invariants_that_exist():
    for method in METHODS.values():
        assert set(method.gives_up) <= set(INVARIANTS)


@pytest.mark.parametrize("method", ["gossip", Gossip, build_gossip], ids=["name", "class", "function"])
def test_a_method_is_given_by_name_class_or_function(method):
    report = gossamer.testing.check_method(method, only=FAST)
    assert report.method == "gossip"
    assert [(result.name, result.outcome) for result in report.results] == [(name, "passed") for name in FAST]
    assert str(report).splitlines()[0] == "method gossip: 4 passed"
    assert not report.failures


def test_options_are_those_of_the_method():
    assert check_method(Gossip, only="exchanges", rate=3.0).outcome("exchanges") == "passed"
    with pytest.raises(InputError, match=r"gossip has no option 'rat': expected some of .*rate"):
        check_method(Gossip, rat=3.0)
    with pytest.raises(InputError, match="--rate is -1"):
        check_method(Gossip, rate=-1)
    with pytest.raises(MethodCheckError, match="did not communicate twice"):
        check_method(Gossip, only="exchanges", rate=1e-9)


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(InputError, match="unknown check 'men'"):
        check_method(Gossip, only="men")
    with pytest.raises(InputError, match="give its class and its options"):
        check_method(build_gossip(build("ring", 4)))
    with pytest.raises(InputError, match="expected a subclass of gossamer"):
        check_method(dict)

    class Local(Gossip):
        pass

    with pytest.raises(InputError, match=r"Local is defined inside a function, where a new process cannot import it"):
        check_method(Local)
    assert check_method(Local, real=False, only=FAST).failures == []


def test_a_method_that_gives_an_invariant_up_is_not_checked_for_it():
    class Careless(faulty.Overwrites):
        gives_up = ("mean",)

    report = check_method(Careless, real=False, only=["exchanges", "mean"])
    assert [result.outcome for result in report.results] == ["passed", "given up"]
    with pytest.raises(MethodCheckError):
        check_method(faulty.Overwrites, real=False, only=["exchanges", "mean"])


def test_after_a_failure_later_checks_are_skipped():
    seen = []
    with pytest.raises(MethodCheckError) as caught:
        check_method(faulty.SaysNothing, callback=seen.append)
    assert seen == caught.value.report.results
    assert [result.outcome for result in seen] == ["failed"] + ["skipped"] * (len(CHECKS) - 1)
    assert {result.detail for result in seen[1:]} == {"because of declaration"}


@pytest.mark.parametrize(
    ("method", "timeout_s", "said"),
    [
        (faulty.FailsInAProcess, 60, r"worker \d failed: ValueError: not in a process \(faulty_methods.py, line \d+\)"),
        (faulty.StopsInAProcess, 4, "worker .* did not come to its end in 4 s"),
        (faulty.DiesInAProcess, 60, "worker . killed by SIGKILL"),
    ],
)
def test_a_failure_of_a_real_worker_is_told_and_no_process_is_left(method, timeout_s, said, monkeypatch):
    monkeypatch.setattr(real_run, "JOB_TIMEOUT_S", float(timeout_s))
    with pytest.raises(MethodCheckError) as caught:
        check_method(method, only="processes")
    assert multiprocessing.active_children() == []
    caught.match(said)


SCRIPT = """
from gossamer.methods.gossip import Gossip
from gossamer.testing import check_method


class Mine(Gossip):
    name = "mine"

{}
"""


def run_script(text, tmp_path):
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def test_a_script_checks_a_method_of_its_own(tmp_path):
    guarded = SCRIPT.format('if __name__ == "__main__":\n    print(check_method(Mine, only="processes"))')
    done = run_script(guarded, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "method mine: 1 passed"


def test_a_script_without_a_guard_is_told_so(tmp_path):
    done = run_script(SCRIPT.format('check_method(Mine, only="processes")'), tmp_path)
    assert done.returncode == 1
    assert 'put the call below `if __name__ == "__main__":`' in " ".join(done.stderr.split())


def test_the_reference_has_a_table_of_all_checks():
    page = (Path(__file__).parents[2] / "docs" / "api" / "testing.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    given_up = {name: f"`{check.invariant}`" if check.invariant else "" for name, check in CHECKS.items()}
    assert rows == [f"| `{name}` | {check.rule} | {given_up[name]} |" for name, check in CHECKS.items()]
