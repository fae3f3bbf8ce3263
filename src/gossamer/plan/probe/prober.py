"""Measure a cluster: compute, links, means, and what they cost each other. Runs on every worker, in about a minute.

What is timed is what training does: the task's own steps, and messages through the same process groups. Tables are
taken with all groups of a round at work at once, as they are in training, for every shape of group that some schedule
has on these workers.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gossamer import compress
from gossamer.errors import InputError
from gossamer.plan.machines import (
    EXCHANGE,
    GATHER,
    LATE_GATHER,
    MEAN,
    ComputeProfile,
    Costs,
    Shape,
    Table,
    shapes,
)
from gossamer.plan.probe.findings import Findings, compute_of
from gossamer.plan.probe.session import LostWorker, ProbeSession
from gossamer.topology import build, names

LEAST_BYTES = 4096
SIZE_STEP = 8
"""From one message size to the next."""
WARM_STEPS = 3
NUM_STEPS = 40
MAX_REPEATS = 18
PAUSE_S = 0.05
"""Before a message that is timed alone: links that let some of it through at once have filled up again."""
COMPUTE_SHARE, BESIDE_SHARE = 0.2, 0.2
"""Of the time there is; the rest is for messages."""
BACKGROUND = "/background"
"""The lane of means that are under way beside something else."""


class Steps(Protocol):
    """What is trained: one worker's steps."""

    model: nn.Module

    def gradient(self, number: int) -> Any:
        """Forward and backward of mini-batch ``number``."""

    def update(self, number: int) -> None:
        """The optimizer's step."""

    def settle(self) -> None:
        """Wait until the device has done what it was given."""


Say = Callable[[str], None]
"""Called with what is being measured."""


def probe(
    session: ProbeSession, steps: Steps, keep_pace: Callable[[float], None], budget_s: float, say: Say
) -> Findings:
    """Measure with all workers; every worker returns the same findings, as far as it came."""
    sizes = [p.numel() for p in steps.model.parameters() if p.requires_grad]
    findings = Findings(session.workers, len(set(session.node_of)), sum(sizes))
    prober = Prober(session, findings, budget_s)
    phase = "compute"
    try:
        for phase, measure in (
            ("compute times", lambda: prober.compute(steps, keep_pace)),
            ("messages", lambda: prober.messages(say)),
            ("compute beside messages", lambda: prober.beside(steps, keep_pace)),
            ("mixing", prober.mixing),
        ):
            say(phase)
            measure()
    except LostWorker as lost:
        findings.lost = f"{lost} was lost while measuring {phase}"
    return findings


class Prober:
    """One worker's part."""

    def __init__(self, session: ProbeSession, findings: Findings, budget_s: float) -> None:
        self.session, self.findings, self.budget_s = session, findings, budget_s
        self.per_node = session.workers // findings.nodes
        self.size_bytes = 4 * findings.parameters

    # ComputeProfile

    def compute(self, steps: Steps, keep_pace: Callable[[float], None]) -> None:
        forward: list[float] = []
        hooks = _time_forward(steps, forward)
        until = time.monotonic() + COMPUTE_SHARE * self.budget_s
        whole, gradient = [], []
        self.session.barrier()
        for number in range(WARM_STEPS + NUM_STEPS):
            began = time.monotonic()
            steps.gradient(number)
            steps.settle()
            keep_pace(began)
            middle = time.monotonic()
            steps.update(number)
            steps.settle()
            whole.append(time.monotonic() - began)
            gradient.append(middle - began)
            if number >= WARM_STEPS + 5 and time.monotonic() > until:
                break
        for hook in hooks:
            hook.remove()
        warm = min(WARM_STEPS, len(whole) - 1)
        share = 1 - statistics.median(forward[warm:]) / statistics.median(gradient[warm:]) if forward else 0.0
        told = self.session.tell("compute", [whole[warm:], gradient[warm:], share])
        self.findings.compute = compute_of([each[0] for each in told], [each[1] for each in told], [e[2] for e in told])
        self.findings.memory_bytes = min(self.session.tell("memory", _free_memory(self.per_node)))

    def beside(self, steps: Steps, keep_pace: Callable[[float], None]) -> None:
        """ComputeProfile and small messages while a mean of all is always under way."""
        everybody = tuple(range(self.session.workers))
        if len(everybody) == 1 or self.findings.compute is None:
            return
        over = threading.Event()
        vector = torch.ones(2 * self.findings.parameters)
        failed: list[LostWorker] = []
        self.session.mean(everybody, torch.ones(1), BACKGROUND)

        def communicate() -> None:
            # All stop after the same mean: the last element says whether everybody still goes on.
            try:
                while True:
                    vector[-1] = float(not over.is_set())
                    if float(self.session.mean(everybody, vector, BACKGROUND)[-1]) < 1:
                        return
            except LostWorker as lost:
                failed.append(lost)

        self.session.barrier()
        thread = threading.Thread(target=communicate, name="gossamer-probe-mean", daemon=True)
        thread.start()
        try:
            times = self._steps_beside(steps, keep_pace)
            small = self._gathers_beside(everybody)
        finally:
            over.set()
            thread.join()
        if failed:
            raise failed[0]
        factors = self.findings.compute.worker_factors(self.session.workers)
        own = statistics.median(times) / float(factors[self.session.rank])
        slower = statistics.median(self.session.tell("beside", own)) / _median(self.findings.compute)
        self.findings.costs = Costs(slowdown=max(1.0, slower))
        self.findings.tables.append(small)

    def _steps_beside(self, steps: Steps, keep_pace: Callable[[float], None]) -> list[float]:
        until = time.monotonic() + BESIDE_SHARE / 2 * self.budget_s
        times: list[float] = []
        while time.monotonic() < until or len(times) < 3:
            began = time.monotonic()
            steps.gradient(len(times))
            steps.settle()
            keep_pace(began)
            steps.update(len(times))
            steps.settle()
            times.append(time.monotonic() - began)
        return times

    def _gathers_beside(self, everybody: tuple[int, ...]) -> Table:
        """Small gathers behind the queues of a long mean."""
        sizes = [LEAST_BYTES, max(2 * LEAST_BYTES, self.size_bytes // 64)]
        seconds: list[float] = []
        spread = 0.0
        for size in sizes:
            part = torch.ones(size // 4)
            # One at a time, as in training: each has compute before it.
            (first,) = self._timed(GATHER, everybody, part, part, 1)
            share = BESIDE_SHARE / 4 * self.budget_s
            repeats = self.session.tell("repeats", min(MAX_REPEATS, int(share / max(first, 1e-6))))[0]
            times = [self._timed(GATHER, everybody, part, part, 1)[0] for _ in range(max(2, repeats))]
            of_runs = np.mean(self.session.tell("times", times), axis=0)
            seconds.append(_usual(of_runs))
            spread = float(np.std(np.log(of_runs)))
        return Table(
            kind=LATE_GATHER,
            shape=Shape(len(everybody), self.findings.nodes),
            sizes_bytes=tuple(sizes),
            seconds=tuple(seconds),
            spread=round(spread, 3),
        )

    # Messages

    def messages(self, say: Say) -> None:
        rounds = list(self._rounds())
        seconds = (1 - COMPUTE_SHARE - BESIDE_SHARE) * self.budget_s / max(1, len(rounds))
        for kind, shape, groups in rounds:
            say(f"{kind} of {shape.members} workers on {shape.nodes} nodes, {shape.at_once} at once")
            self.findings.tables.append(self._table(kind, shape, groups, seconds))

    def _rounds(self) -> Iterator[tuple[str, Shape, list[tuple[int, ...]]]]:
        """Every shape there is, and the groups that have it, each time with all groups of their round."""
        n = self.session.workers
        everybody = tuple(range(n))
        if n == 1:
            return
        for pair in ((0, 1), (0, self.per_node)):
            crosses = pair[1] // self.per_node > 0
            if pair[1] < n and (crosses or self.per_node > 1):
                yield EXCHANGE, Shape(2, 1 + crosses, 1), [pair]
        known: set[Shape] = set()
        for name in names():
            try:
                topology = build(name, workers=n, nodes=self.findings.nodes)
            except InputError:
                continue
            for groups in topology.rounds:
                members = [group.members for group in groups]
                made = shapes(members, self.per_node)
                new = [shape for shape in dict.fromkeys(made) if shape not in known]
                known |= set(made)
                for shape in new:
                    yield MEAN, shape, members
                    if shape.members == 2 and shape.at_once > 1:
                        yield EXCHANGE, shape, members
        yield GATHER, Shape(n, self.findings.nodes, 1), [everybody]

    def _table(self, kind: str, shape: Shape, groups: list[tuple[int, ...]], seconds: float) -> Table:
        """Time one kind of message over all sizes; groups of other shapes in the same round are at work too."""
        mine = next((members for members in groups if self.session.rank in members), None)
        counted = {
            rank
            for members, found in zip(groups, shapes(groups, self.per_node), strict=True)
            for rank in members
            if found == shape
        }
        sizes = message_sizes(self.size_bytes, kind, shape.members == self.session.workers)
        rested: list[float] = []
        in_a_row: list[float] = []
        spread = 0.0
        share = seconds / len(sizes)
        for size in sizes:
            vector = torch.ones(max(1, size // 4))
            received = torch.empty_like(vector)
            (first,) = self._timed(kind, mine, vector, received, 1)
            repeats = self.session.tell("repeats", min(MAX_REPEATS, int(share / max(first, 1e-6))))[0]
            alone = []
            for _ in range(max(1, repeats // 3)):
                time.sleep(PAUSE_S)
                alone += self._timed(kind, mine, vector, received, 1)
            row = self._timed(kind, mine, vector, received, 1 + max(1, repeats // 2))[1:]
            heard = self.session.tell("times", [alone, row] if self.session.rank in counted else None)
            of_pauses, of_rows = (np.mean([each[k] for each in heard if each is not None], axis=0) for k in (0, 1))
            rested.append(_usual(of_pauses))
            in_a_row.append(max(rested[-1], _usual(of_rows)))
            spread = float(np.std(np.log(of_rows))) if len(of_rows) > 2 else 0.0
        return Table(
            kind=kind,
            shape=shape,
            sizes_bytes=tuple(sizes),
            seconds=tuple(rested),
            in_a_row=tuple(in_a_row),
            spread=round(spread, 3),
        )

    def _timed(
        self, kind: str, mine: tuple[int, ...] | None, vector: Tensor, received: Tensor, count: int
    ) -> list[float]:
        """Seconds of each of so many messages in a row, started by all workers together."""
        self.session.barrier()
        times = []
        for _ in range(count):
            began = time.monotonic()
            if mine is not None and kind == MEAN:
                self.session.mean(mine, vector)
            elif mine is not None and kind == EXCHANGE:
                self.session.exchange(mine, vector, received)
            elif mine is not None:
                self.session.gather(mine, vector)
            times.append(time.monotonic() - began)
        return times

    # What a worker does itself

    def mixing(self) -> None:
        """Passes over the parameters, and compression, by all workers at once."""
        x, mean, sent = (torch.ones(self.findings.parameters) for _ in range(3))
        self.session.barrier()
        passes = _median_time(lambda: x.add_(mean).sub_(sent)) / 2
        ratio = 128.0
        worker = _Lone(self.session.workers)
        vector = torch.randn(self.findings.parameters)

        def compressed() -> None:
            generator = compress.make("topk", ratio).average(worker, vector, 0, "probe")  # type: ignore[arg-type]
            effect = next(generator)
            try:
                generator.send([effect.tensors] * worker.num_workers)  # type: ignore[union-attr]
            except StopIteration:
                return

        self.session.barrier()
        compressing = _median_time(compressed)
        told = np.median(self.session.tell("mixing", [passes, compressing]), axis=0)
        self.findings.costs = Costs(
            slowdown=self.findings.costs.slowdown,
            mixing_bytes_per_s=self.size_bytes / max(float(told[0]), 1e-9),
            compressing_bytes_per_s=self.size_bytes / max(float(told[1]), 1e-9),
        )


@dataclass(frozen=True)
class _Lone:
    """As much of a worker as a compressor looks at."""

    num_workers: int


def message_sizes(size_bytes: int, kind: str, everybody: bool) -> list[int]:
    """From 4 kB to the model's size; means of all go to twice that, for methods that send two vectors at once."""
    # Two sizes at least: one tells nothing of the bandwidth.
    most = max(SIZE_STEP * LEAST_BYTES, size_bytes // 16 if kind == GATHER else size_bytes)
    sizes = []
    size = LEAST_BYTES
    while size < 0.7 * most:
        sizes.append(size)
        size *= SIZE_STEP
    sizes.append(most)
    return [*sizes, 2 * sizes[-1]] if kind == MEAN and everybody else sizes


def _usual(times: np.ndarray) -> float:
    """The mean without the worst tenth, where another program had the machine."""
    return float(np.sort(times)[: max(1, math.ceil(0.9 * len(times)))].mean())


def _median(compute: ComputeProfile) -> float:
    return float(np.median(compute.sample_s))


def _median_time(action: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        began = time.monotonic()
        action()
        times.append(time.monotonic() - began)
    return statistics.median(times)


def _time_forward(steps: Steps, times: list[float]) -> list[Any]:
    began = [0.0]

    def before(*_: Any) -> None:
        steps.settle()
        began[0] = time.monotonic()

    def after(*_: Any) -> None:
        steps.settle()
        times.append(time.monotonic() - began[0])

    return [steps.model.register_forward_pre_hook(before), steps.model.register_forward_hook(after)]


def _free_memory(per_node: int) -> float:
    """What is left for one worker, in bytes."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / per_node
    except (ValueError, OSError):
        return 0.0
