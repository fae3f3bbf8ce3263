"""What the fault suite needs of pytest: each test as often as is asked for, and a common beginning.

``repeat_faults`` loads it, with ``-p fault_plugin``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from real_workers import FORKS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test as often as is asked for, or once."""
    first, runs = int(os.environ.get("FAULT_FIRST", "1")), int(os.environ.get("FAULT_RUNS", "1"))
    if is_once(metafunc.function):
        runs = 1
    if runs > 1 and "run" not in metafunc.fixturenames:
        metafunc.fixturenames.append("run")
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", range(first, first + runs))


def is_once(test: object) -> bool:
    return bool(getattr(test, "once", False))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if int(os.environ.get("FAULT_FIRST", "1")) > 1:
        again = [item for item in items if is_once(getattr(item, "function", None))]
        items[:] = [item for item in items if item not in again]
        config.hook.pytest_deselected(items=again)


@pytest.fixture(scope="session", autouse=True)
def all_loaded() -> None:
    """Where several processes share these tests, all begin when the last has loaded torch: it takes every core."""
    if "FAULT_READY" in os.environ:
        first = FORKS.Process(target=int)
        first.start()
        first.join(120)
        ready, processes = Path(os.environ["FAULT_READY"]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        (ready / str(os.getpid())).touch()
        until = time.monotonic() + 300
        while len(list(ready.iterdir())) < processes and time.monotonic() < until:
            time.sleep(0.1)
