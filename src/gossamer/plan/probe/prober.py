"""Probe a cluster: compute times, messages, and how they slow each other down. Every worker, or rank of one, runs it.

It times what training does: the task's own steps, and messages through the same kind of process groups.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from gossamer import compress
from gossamer.plan.cluster_spec import ELEMENT_BYTES, ComputeProfile, Costs
from gossamer.plan.probe.findings import Findings, compute_profile, waited_s
from gossamer.plan.probe.message_timer import MessageTimer
from gossamer.plan.probe.session import ProbeSession, WorkerLost

if TYPE_CHECKING:
    from gossamer.plan.probe.replica_steps import ReplicaSteps

NUM_WARM_UP_STEPS = 3
MIN_STEPS = 5
MAX_STEPS = 40
COMPUTE_SHARE, OVERLAP_SHARE, INSIDE_SHARE = 0.2, 0.2, 0.2
"""Of the time budget: for steps alone, for steps during messages, for what happens inside replicas, if there are any.
Messages between workers have the rest."""
BACKGROUND = "/background"
"""The channel of means in flight during something else."""


class TrainingSteps(Protocol):
    model: nn.Module

    def gradient(self, number: int) -> Any:
        """Run forward and backward on mini-batch ``number``."""

    def update(self, number: int) -> None:
        """Run the optimizer's step."""

    def synchronize(self) -> None:
        """Wait until the device has finished."""


def probe(
    session: ProbeSession,
    steps: TrainingSteps,
    delay_gradient: Callable[[float], None],
    budget_s: float,
    report: Callable[[str], None],
    inside: ReplicaSteps | None = None,
) -> Findings:
    """Measure with all workers; every worker returns the same findings, incomplete if a worker is lost.

    Args:
        delay_gradient: called after a gradient with its start time; waits until it has taken as long as it should.
        budget_s: how long to measure, about.
        report: called with what is being measured.
        inside: of the replica of which this process is a rank. ``session`` and ``steps`` are those of this rank.
    """
    parameters = sum(p.numel() for p in steps.model.parameters() if p.requires_grad)
    findings = Findings(session.workers, len(set(session.node_of)), parameters)
    prober = Prober(session, steps, delay_gradient, findings, budget_s, inside)
    phase = "compute times"
    try:
        for phase, measure in (
            ("compute times", prober.measure_compute),
            *([("steps and messages inside replicas", prober.measure_inside)] if inside is not None else []),
            ("messages", lambda: prober.measure_messages(report)),
            ("compute during messages", prober.measure_overlap),
            ("mixing", prober.measure_mixing),
        ):
            report(phase)
            measure()
    except WorkerLost as lost:
        who = str(lost) if inside is None else str(lost).replace("worker", "rank")
        findings.lost = f"{who} was lost while measuring {phase}"
    return findings


class Prober:
    """One worker's part in a probe; writes into ``findings``."""

    def __init__(
        self,
        session: ProbeSession,
        steps: TrainingSteps,
        delay_gradient: Callable[[float], None],
        findings: Findings,
        budget_s: float,
        inside: ReplicaSteps | None,
    ) -> None:
        self.session, self.steps, self.delay_gradient = session, steps, delay_gradient
        self.findings, self.budget_s, self.inside = findings, budget_s, inside
        self.model_bytes = ELEMENT_BYTES * findings.parameters
        part, replica_size = (1.0, 1) if inside is None else (inside.shape.part, inside.shape.ranks)
        self.vector_size = math.ceil(part * findings.parameters)
        self.messages = MessageTimer(session, findings.nodes, ELEMENT_BYTES * self.vector_size, replica_size)
        self._own_step_s = 0.0
        """The median of this rank's steps while nothing travels between replicas."""

    def measure_compute(self) -> None:
        """Time steps alone: forward, gradient, whole step."""
        forward: list[float] = []
        hooks = _time_forward(self.steps, forward)
        until = time.monotonic() + COMPUTE_SHARE * self.budget_s
        step_times, gradient_times = [], []
        self.session.barrier()
        for number in range(NUM_WARM_UP_STEPS + MAX_STEPS):
            gradient_s, step_s = self._timed_step(number)
            gradient_times.append(gradient_s)
            step_times.append(step_s)
            if number >= NUM_WARM_UP_STEPS + MIN_STEPS and time.monotonic() > until:
                break
        for hook in hooks:
            hook.remove()
        del step_times[:NUM_WARM_UP_STEPS], gradient_times[:NUM_WARM_UP_STEPS], forward[:NUM_WARM_UP_STEPS]
        backward_share = 1 - statistics.median(forward) / statistics.median(gradient_times) if forward else 0.0
        shared = self.session.share("compute", [step_times, gradient_times, backward_share])
        self.findings.compute = compute_profile(*(list(values) for values in zip(*shared, strict=True)))
        per_node = self.session.workers // self.findings.nodes
        self.findings.memory_bytes = min(self.session.share("memory", _free_memory(per_node)))

    def _timed_step(self, number: int) -> tuple[float, float]:
        """Run one step; return the seconds of its gradient, and of all of it."""
        began = time.monotonic()
        self.steps.gradient(number)
        self.steps.synchronize()
        self.delay_gradient(began)
        gradient_s = time.monotonic() - began
        self.steps.update(number)
        self.steps.synchronize()
        return gradient_s, time.monotonic() - began

    def measure_inside(self) -> None:
        """Time what the ranks of a replica send each other, and their steps; all replicas at once."""
        inside, compute = self.inside, self.findings.compute
        assert inside is not None
        assert compute is not None
        link = inside.measured_link(self.session, self.model_bytes)
        times = self._replica_steps(inside, INSIDE_SHARE * self.budget_s)
        self._own_step_s = statistics.median(times)
        means = self.session.share("replica steps", statistics.fmean(times))
        self.findings.replica = replace(
            inside.shape,
            link=link,
            measured_s=waited_s(compute, means, inside.shape.ranks),
            measured_bytes=self.model_bytes,
        )

    def _replica_steps(self, inside: ReplicaSteps, budget_s: float) -> list[float]:
        """Return the seconds of the replica's steps, as many as fit into the budget."""
        self.session.barrier()

        def timed(numbers: range) -> list[float]:
            return [self.session.guarded(partial(inside.timed_step, number)) for number in numbers]

        warm_up = timed(range(NUM_WARM_UP_STEPS))
        # The same number on all ranks, which wait for each other in each step. The first one is longer than the others.
        took_s = max(self.session.share("warm-up", [sum(warm_up), statistics.fmean(warm_up[1:])]), key=lambda s: s[1])
        fitting = int((budget_s - took_s[0]) / took_s[1])
        last = NUM_WARM_UP_STEPS + min(MAX_STEPS, max(MIN_STEPS, fitting))
        return timed(range(NUM_WARM_UP_STEPS, last))

    def measure_messages(self, report: Callable[[str], None]) -> None:
        share = 1 - COMPUTE_SHARE - OVERLAP_SHARE - (0 if self.inside is None else INSIDE_SHARE)
        for table in self.messages.tables(share * self.budget_s, report):
            self.findings.tables.append(table)

    def measure_overlap(self) -> None:
        """Time steps and small gathers while a mean of all workers is always in flight."""
        everybody = self.messages.counterparts
        compute = self.findings.compute
        if len(everybody) == 1 or compute is None:
            return
        done = threading.Event()
        vector = torch.ones(2 * self.vector_size)
        errors: list[WorkerLost] = []
        self.session.mean(everybody, torch.ones(1), BACKGROUND)

        def communicate() -> None:
            # All workers have to stop after the same mean: the last element is 1 as long as all of them go on.
            try:
                while True:
                    vector[-1] = float(not done.is_set())
                    if float(self.session.mean(everybody, vector, BACKGROUND)[-1]) < 1:
                        return
            except WorkerLost as lost:
                errors.append(lost)

        self.session.barrier()
        thread = threading.Thread(target=communicate, name="gossamer-probe-mean", daemon=True)
        thread.start()
        try:
            slowdown = self._slowdown_of_step(compute, OVERLAP_SHARE / 2 * self.budget_s)
            gathers = self.messages.gathers_during_mean(OVERLAP_SHARE / 2 * self.budget_s)
        finally:
            done.set()
            thread.join()
        if errors:
            raise errors[0]
        self.findings.costs = Costs(slowdown=max(1.0, statistics.median(self.session.share("overlap", slowdown))))
        self.findings.tables.append(gathers)

    def _slowdown_of_step(self, compute: ComputeProfile, budget_s: float) -> float:
        """Return how many times longer this rank's steps take now than alone."""
        if self.inside is not None:
            return statistics.median(self._replica_steps(self.inside, budget_s)) / self._own_step_s
        until = time.monotonic() + budget_s
        times: list[float] = []
        while time.monotonic() < until or len(times) < 3:
            times.append(self._timed_step(len(times))[1])
        factor = float(compute.worker_factors(self.session.workers)[self.session.rank])
        return statistics.median(times) / factor / statistics.median(compute.sample_s)

    def measure_mixing(self) -> None:
        """Time a pass over the parameters, and compression, on all workers at once."""
        x, mean, sent = (torch.ones(self.findings.parameters) for _ in range(3))
        self.session.barrier()
        pass_s = _median_time(lambda: x.add_(mean).sub_(sent)) / 2
        worker = SimpleNamespace(num_workers=self.messages.workers)  # all that a compressor uses of it
        vector = torch.randn(self.findings.parameters)

        def compress_and_average() -> None:
            generator = compress.make("topk", 128.0).average(worker, vector, 0, "probe")
            effect = next(generator)
            try:
                generator.send([effect.tensors] * worker.num_workers)  # type: ignore[union-attr]
            except StopIteration as end:
                mean, kept = end.value
                compress.add_parts(vector, [kept], -1.0)
                compress.add_parts(vector, mean)

        self.session.barrier()
        compressing_s = _median_time(compress_and_average)
        pass_s, compressing_s = np.median(self.session.share("mixing", [pass_s, compressing_s]), axis=0).tolist()
        self.findings.costs = Costs(
            slowdown=self.findings.costs.slowdown,
            mixing_bytes_per_s=self.model_bytes / max(pass_s, 1e-9),
            compressing_bytes_per_s=self.model_bytes / max(compressing_s, 1e-9),
        )


def _median_time(action: Callable[[], Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        began = time.monotonic()
        action()
        times.append(time.monotonic() - began)
    return statistics.median(times)


def _time_forward(steps: TrainingSteps, times: list[float]) -> list[Any]:
    """Append the seconds of every forward pass to ``times``; return the hooks, for removal."""
    began = [0.0]

    def before(*_: Any) -> None:
        steps.synchronize()
        began[0] = time.monotonic()

    def after(*_: Any) -> None:
        steps.synchronize()
        times.append(time.monotonic() - began[0])

    return [steps.model.register_forward_pre_hook(before), steps.model.register_forward_hook(after)]


def _free_memory(per_node: int) -> float:
    """Return the free memory of one worker in bytes; 0 if unknown."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / per_node
    except (ValueError, OSError):
        return 0.0
