"""What the fault suite says about tests that it skips, and which victims one run chooses."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

from fault_checks import EVERY, spread, victim_of
from repeat_faults import CANNOT_BE, count_skips

SKIPS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_skips(number):
    pytest.skip("needs root to make network namespaces")

@pytest.mark.skipif(True, reason="this machine has no IPv6")
def test_has_not():
    pass

def test_passes():
    pass
"""


def test_skipped_tests_are_counted_by_reason(tmp_path: Path) -> None:
    (tmp_path / "test_skips.py").write_text(SKIPS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", "-v", "-rs", "test_skips.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout
    skips = count_skips(ran.stdout.splitlines())
    assert skips == Counter({"needs root to make network namespaces": 3, "this machine has no IPv6": 1})
    assert [why for why in skips if not CANNOT_BE.search(why)] == ["needs root to make network namespaces"]


def test_one_run_kills_the_host_of_the_store_and_others() -> None:
    for run in (1, 2):
        assert {victim_of(method, run) for method in EVERY} == {0, 2}
    assert all(victim_of(method, 1) != victim_of(method, 2) for method in EVERY)
    for run in (1, 2, 7):
        times = sorted(spread(method, run) for method in EVERY)
        assert all(0 <= time < 1 for time in times)
        assert max(after - before for before, after in pairwise(times)) < 1.5 / len(EVERY)
