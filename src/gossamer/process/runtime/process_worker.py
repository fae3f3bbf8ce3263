"""A real worker, as its method sees it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from gossamer.effects import Effect, Gather, Mean, Shift, Swap, Ticket, Wait
from gossamer.process.roster.placement import Placement
from gossamer.process.runtime.flat_model import FlatModel
from gossamer.recording import Recorder
from gossamer.seeds import stream
from gossamer.vectors import memory
from gossamer.worker import Worker


class ProcessWorker:
    """The worker of this process (a ``gossamer.worker.Worker``)."""

    def __init__(
        self, run_rank: int, placement: Placement, seed: int, flat_model: FlatModel, recorder: Recorder
    ) -> None:
        """``run_rank``: the rank of this worker in the run, which never changes."""
        self.run_rank, self.seed = run_rank, seed
        self.place(placement)
        self.rng = stream(seed, "method", run_rank)
        self.flat_model, self.recorder = flat_model, recorder
        self.step = 0
        self.scalars: dict[str, float] = {}
        self.tickets: dict[str, Ticket] = {}
        self.vectors: dict[str, Tensor] = {}
        self._snapshot: Tensor | None = None
        self._last_step_at = time.monotonic()
        self.step_s = 0.0
        """Moving average of the time of a step; 0 before the second one."""
        self.counts_time = False
        """This worker is a rank of a replica: to its method, time is the number of gradients."""
        self.num_pending = 0
        """1 from when a gradient is there until its step counts."""

    def place(self, placement: Placement) -> None:
        """Take a place among the workers: methods see positions, and the topology of so many workers."""
        self.placement, self.topology = placement, placement.topology
        self.rank, self.num_workers = placement.position(self.run_rank), placement.topology.workers

    @property
    def x(self) -> Tensor:
        return self.flat_model.x

    @property
    def gradient(self) -> Tensor:
        return self.flat_model.gradient()

    def add_gradient(self, vector: Tensor) -> None:
        self.flat_model.add_gradient(vector)

    @property
    def time(self) -> float:
        # The ranks of a replica have clocks of their own, and count the same gradients.
        return float(self.step + self.num_pending) if self.counts_time else self.now

    @property
    def now(self) -> float:
        """Local time by the clock of this process."""
        # Between two steps time advances at the usual pace, at most to the next step.
        if not self.step_s:
            return float(self.step)
        return self.step + min(1.0, (time.monotonic() - self._last_step_at) / self.step_s)

    def count_step(self) -> None:
        now = time.monotonic()
        duration, self._last_step_at = now - self._last_step_at, now
        if self.step:
            self.step_s = duration if not self.step_s else 0.9 * self.step_s + 0.1 * duration
        self.step += 1
        self.num_pending = 0

    def vector(self, name: str, size: int | None = None) -> Tensor:
        if name not in self.vectors:
            size = self.flat_model.flat.size if size is None else size
            self.vectors[name] = memory.zeros(size, self.x.dtype, self.x.device)
        return self.vectors[name]

    @property
    def offsets(self) -> tuple[int, ...]:
        return (*(part.start for part in self.flat_model.flat.parts), self.flat_model.flat.size)

    def read_optimizer_state(self, name: str) -> Tensor:
        return self.flat_model.read_optimizer_state(name)

    def write_optimizer_state(self, name: str, value: Tensor) -> None:
        self.flat_model.write_optimizer_state(name, value)

    def optimizer_setting(self, name: str) -> Any:
        return self.flat_model.optimizer.param_groups[0][name]

    def snapshot(self, write: Callable[[Worker, Tensor], None] | None = None) -> Tensor:
        # At most one communication of a worker is in flight, so one buffer serves all snapshots.
        if self._snapshot is None:
            self._snapshot = memory.zeros_like(self.x)
        began = time.monotonic()
        if write is None:
            self._snapshot.copy_(self.x)
        else:
            write(self, self._snapshot)
        self.recorder.snapshot(self.run_rank, began, time.monotonic())
        return self._snapshot


class MergeRecorder:
    """Records when a generator merges the answer to a communication, and the answer's staleness."""

    def __init__(self, worker: ProcessWorker) -> None:
        self.worker = worker
        self._since_step: int | None = None
        """The step at which this worker sent its part; None if the effect is no communication."""

    def requested(self, effect: Effect) -> None:
        """The generator has yielded this effect."""
        if isinstance(effect, Wait):
            self._since_step = effect.ticket.since_step
        else:
            self._since_step = self.worker.step if isinstance(effect, Mean | Gather | Shift | Swap) else None

    @contextlib.contextmanager
    def resume(self, answer: Any) -> Iterator[None]:
        """The generator runs with its answer inside this block."""
        began, since_step = time.monotonic(), self._since_step
        yield
        if since_step is not None and answer is not None:
            self.worker.recorder.merged(self.worker.run_rank, began, time.monotonic(), self.worker.step - since_step)
