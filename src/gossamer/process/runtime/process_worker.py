"""A real worker, as its method sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gossamer import memory
from gossamer.effects import Ticket
from gossamer.process.runtime.flat_model import FlatModel
from gossamer.process.runtime.step_recorder import StepRecorder
from gossamer.seeds import stream
from gossamer.topology import Topology
from gossamer.worker import Worker


class ProcessWorker:
    """This process's worker (a ``gossamer.worker.Worker``)."""

    def __init__(self, rank: int, topology: Topology, seed: int, flat_model: FlatModel) -> None:
        self.rank, self.topology, self.seed = rank, topology, seed
        self.num_workers = topology.workers
        self.rng = stream(seed, "method", rank)
        self.flat_model = flat_model
        self.step = 0
        self.scalars: dict[str, float] = {}
        self.tickets: dict[str, Ticket] = {}
        self.vectors: dict[str, Tensor] = {}
        self.step_recorder: StepRecorder | None = None
        self._snapshot: Tensor | None = None
        self._stepped_at = time.monotonic()
        self.step_s = 0.0
        """How long a step takes this worker on average."""

    @property
    def x(self) -> Tensor:
        return self.flat_model.x

    @property
    def gradient(self) -> Tensor:
        return self.flat_model.gradient()

    @property
    def time(self) -> float:
        # Between two steps time goes on as usual, up to the step that is due.
        if not self.step_s:
            return float(self.step)
        return self.step + min(1.0, (time.monotonic() - self._stepped_at) / self.step_s)

    def stepped(self) -> None:
        """One more step is made."""
        now = time.monotonic()
        took, self._stepped_at = now - self._stepped_at, now
        if self.step:
            self.step_s = took if not self.step_s else 0.9 * self.step_s + 0.1 * took
        self.step += 1

    def vector(self, name: str, size: int | None = None) -> Tensor:
        if name not in self.vectors:
            size = self.flat_model.flat.size if size is None else size
            self.vectors[name] = memory.zeros(size, self.x.dtype, self.x.device)
        return self.vectors[name]

    def optimizer_setting(self, name: str) -> Any:
        return self.flat_model.optimizer.param_groups[0][name]

    def snapshot(self, write: Callable[[Worker, Tensor], None] | None = None) -> Tensor:
        # One communication per worker is under way, so one buffer, made once, serves all snapshots.
        if self._snapshot is None:
            self._snapshot = memory.zeros_like(self.x)
        began = time.monotonic()
        if write is None:
            self._snapshot.copy_(self.x)
        else:
            write(self, self._snapshot)
        if self.step_recorder is not None:
            self.step_recorder.snapshot(began)
        return self._snapshot
