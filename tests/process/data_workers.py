"""Workers without processes for tests of the data: they share a store that is a dictionary."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch

from gossamer.process.data.worker_data import WorkerData
from gossamer.process.events import Events
from gossamer.process.store.parsing import Refusals

LOCK = threading.Lock()
"""Workers reserve batches in threads of their own."""


class DictStore:
    """What the data side needs of the store."""

    def __init__(self, entries: dict[str, str]) -> None:
        self.entries, self.on_move = entries, []

    def get(self, key):
        return self.entries[key].encode() if key in self.entries else None

    def set(self, key, value):
        self.entries[key] = value
        return True

    def compare_set(self, key, value, expected=""):
        if self.entries.get(key, "") == (expected if isinstance(expected, str) else expected.decode()):
            self.entries[key] = value
        return self.get(key)

    def add(self, key, amount):
        with LOCK:
            count = self.entries.get(key, "0")
            if not count.isdigit() or len(count) > 18:
                return None
            self.entries[key] = str(int(count) + amount)
            return int(self.entries[key])


class Job:
    """Some workers of one job. ``lost`` are those that the others believe dead."""

    def __init__(self, count: int, *, seed: int = 0, lockstep: bool = False) -> None:
        self.count, self.seed, self.lockstep = count, seed, lockstep
        self.entries: dict[str, str] = {}
        self.lost: set[int] = set()
        self.refused: list[str] = []

    def worker(self, rank: int, *, came_back: bool = False, at: tuple[int, int] | None = None) -> WorkerData:
        heartbeats = SimpleNamespace(lost=self.lost, done=lambda other: False)
        model = torch.nn.Linear(1, 1)
        runtime = SimpleNamespace(
            rank=rank,
            everybody=range(self.count),
            store=DictStore(self.entries),
            refusals=Refusals(self.refused.append),
            heartbeats=heartbeats,
            method=SimpleNamespace(lockstep=self.lockstep),
            state=SimpleNamespace(events=Events(rank), data_position=at),
            worker=SimpleNamespace(seed=self.seed, step_s=0.0),
            flat_model=SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=1.0)),
            came_back=came_back,
        )
        return WorkerData(runtime)

    def workers(self) -> list[WorkerData]:
        return [self.worker(rank) for rank in range(self.count)]


def seen(loader) -> list[int]:
    """The numbers that one pass of a loader yields."""
    return [number for batch in loader for number in torch.as_tensor(batch).flatten().tolist()]
