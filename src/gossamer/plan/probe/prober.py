"""Probe a cluster: compute times, messages, and how they slow each other down. Every worker runs it.

It times what training does: the task's own steps, and messages through the same kind of process groups.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from gossamer import compress
from gossamer.plan.cluster_spec import Costs
from gossamer.plan.probe.findings import Findings, compute_profile
from gossamer.plan.probe.message_timer import MessageTimer
from gossamer.plan.probe.session import ProbeSession, WorkerLost

NUM_WARM_UP_STEPS = 3
MIN_STEPS = 5
MAX_STEPS = 40
COMPUTE_SHARE, OVERLAP_SHARE = 0.2, 0.2
"""Of the time budget, for steps alone and for steps during messages; messages alone have the rest."""
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
) -> Findings:
    """Measure with all workers; every worker returns the same findings, incomplete if a worker is lost.

    Args:
        delay_gradient: called after a gradient with its start time; waits until it has taken as long as it should.
        budget_s: how long to measure, about.
        report: called with what is being measured.
    """
    parameters = sum(p.numel() for p in steps.model.parameters() if p.requires_grad)
    findings = Findings(session.workers, len(set(session.node_of)), parameters)
    prober = Prober(session, steps, delay_gradient, findings, budget_s)
    phase = "compute times"
    try:
        for phase, measure in (
            ("compute times", prober.measure_compute),
            ("messages", lambda: prober.measure_messages(report)),
            ("compute during messages", prober.measure_overlap),
            ("mixing", prober.measure_mixing),
        ):
            report(phase)
            measure()
    except WorkerLost as lost:
        findings.lost = f"{lost} was lost while measuring {phase}"
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
    ) -> None:
        self.session, self.steps, self.delay_gradient = session, steps, delay_gradient
        self.findings, self.budget_s = findings, budget_s
        self.model_bytes = 4 * findings.parameters
        self.messages = MessageTimer(session, findings.nodes, self.model_bytes)

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

    def measure_messages(self, report: Callable[[str], None]) -> None:
        for table in self.messages.tables((1 - COMPUTE_SHARE - OVERLAP_SHARE) * self.budget_s, report):
            self.findings.tables.append(table)

    def measure_overlap(self) -> None:
        """Time steps and small gathers while a mean of all workers is always in flight."""
        everybody = tuple(range(self.session.workers))
        compute = self.findings.compute
        if len(everybody) == 1 or compute is None:
            return
        done = threading.Event()
        vector = torch.ones(2 * self.findings.parameters)
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
            until = time.monotonic() + OVERLAP_SHARE / 2 * self.budget_s
            times: list[float] = []
            while time.monotonic() < until or len(times) < 3:
                times.append(self._timed_step(len(times))[1])
            gathers = self.messages.gathers_during_mean(OVERLAP_SHARE / 2 * self.budget_s)
        finally:
            done.set()
            thread.join()
        if errors:
            raise errors[0]
        factor = float(compute.worker_factors(self.session.workers)[self.session.rank])
        typical_s = statistics.median(self.session.share("overlap", statistics.median(times) / factor))
        self.findings.costs = Costs(slowdown=max(1.0, typical_s / statistics.median(compute.sample_s)))
        self.findings.tables.append(gathers)

    def measure_mixing(self) -> None:
        """Time a pass over the parameters, and compression, on all workers at once."""
        x, mean, sent = (torch.ones(self.findings.parameters) for _ in range(3))
        self.session.barrier()
        pass_s = _median_time(lambda: x.add_(mean).sub_(sent)) / 2
        worker = SimpleNamespace(num_workers=self.session.workers)  # all that a compressor uses of it
        vector = torch.randn(self.findings.parameters)

        def compress_and_average() -> None:
            generator = compress.make("topk", 128.0).average(worker, vector, 0, "probe")
            effect = next(generator)
            try:
                generator.send([effect.tensors] * worker.num_workers)  # type: ignore[union-attr]
            except StopIteration:
                return

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
