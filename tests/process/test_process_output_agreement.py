"""All workers say the same about a folder that one of them cannot write, also if some are taken for dead meanwhile."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.runs import output_agreement
from gossamer.runs.output_agreement import agreed_problem


class MemoryStore:
    """A store of one process."""

    hosted_here = False

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> bool:
        with self._lock:
            self._values[key] = value.encode()
        return True

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._values.get(key)

    def compare_set(self, key: str, value: str) -> bytes:
        with self._lock:
            return self._values.setdefault(key, value.encode())


def worker(rank: int, store: MemoryStore, *lost: int) -> Any:
    return SimpleNamespace(
        rank=rank, everybody=range(2), store=store, heartbeats=SimpleNamespace(lost=set(lost)), state=None
    )


@pytest.mark.parametrize(
    ("problems", "line"),
    [
        (("is a file", "is a file"), "is a file"),
        (("", "is full"), "worker 1: is full"),
        (("is a file", ""), "worker 0: is a file"),
        (("", ""), ""),
    ],
)
def test_all_say_the_same(problems: tuple[str, str], line: str) -> None:
    store, said = MemoryStore(), {}

    def say(rank: int) -> None:
        said[rank] = agreed_problem(worker(rank, store), problems[rank])

    threads = [threading.Thread(target=say, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said == {0: line, 1: line}


@pytest.mark.parametrize(
    ("problems", "line"), [(("is a file", "is a file"), "is a file"), (("", "is full"), "is full")]
)
def test_a_worker_that_was_taken_for_dead_obeys_or_fails_alone(problems: tuple[str, str], line: str) -> None:
    store = MemoryStore()
    assert agreed_problem(worker(0, store, 1), problems[0]) == problems[0]
    assert agreed_problem(worker(1, store, 0), problems[1]) == line


def test_a_worker_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_agreement, "AGREE_TIMEOUT_S", 0.05)
    assert agreed_problem(worker(0, MemoryStore()), "").startswith("worker 1: it did not say in time whether it can")
