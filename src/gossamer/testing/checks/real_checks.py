"""Checks with real processes."""

from __future__ import annotations

import dataclasses
import math

import torch

from gossamer.testing.checks.context import Context
from gossamer.testing.violations import Broken, NotApplicable
from gossamer.testing.worlds.real_run import Twin, largest_difference, run_rejoin

TOLERANCE = 1e-8
"""Sums in another order, in float64, over a few dozen steps."""


def processes(context: Context) -> None:
    """The method trains with real processes: all exchange, nobody fails or waits endlessly, all end with one model."""
    results = context.training.results
    for rank, result in enumerate(results):
        if not result["exchanges"]:
            raise Broken("processes", f"worker {rank} made {result['steps']} steps and no exchange")
        if result["weights"] != results[0]["weights"] or not all(map(math.isfinite, result["weights"])):
            raise Broken("processes", f"after finish worker {rank} has other weights than worker 0")


def twins(context: Context) -> None:
    """The same seed takes the same way with real processes and in the virtual cluster."""
    twin = _twin(context)
    for rank, result in enumerate(context.training.results):
        for step, x in enumerate(result["trajectory"]):
            apart = largest_difference(x, twin.trajectory[rank, step])
            if not apart <= TOLERANCE:
                raise Broken("twins", f"after step {step + 1} worker {rank} is {apart:.2g} away from its twin")
        apart = largest_difference(result["weights"], twin.model)
        if not apart <= TOLERANCE:
            raise Broken("twins", f"after finish worker {rank} is {apart:.2g} away from its twin")


def bytes_sent(context: Context) -> None:
    """Real workers send as many bytes as virtual ones."""
    real, virtual = [result["bytes_sent"] for result in context.training.results], _twin(context).bytes_sent
    if real != virtual:
        raise Broken("bytes_sent", f"real workers sent {real} bytes, virtual ones {virtual}")


def _twin(context: Context) -> Twin:
    if context.training.twin is None:
        raise NotApplicable("workers do not wait for each other: no two runs are the same")
    return context.training.twin


def real_mean(context: Context) -> None:
    """With real processes, too, the sum of all models moves only by the workers' own updates."""
    results = context.training.results
    if any(result["conserved_end"] is None for result in results):
        raise Broken("real_mean", "finish did not come to its end on all workers")
    start, added, end = (
        torch.tensor([result[name] for result in results], dtype=torch.float64).sum(0)
        for name in ("conserved_start", "added", "conserved_end")
    )
    apart = largest_difference(start + added, end)
    if not apart <= TOLERANCE:
        raise Broken("real_mean", f"the sum of all models is {apart:.2g} away from its start plus the workers' updates")


def checkpoint(context: Context) -> None:
    """A checkpoint contains all state: a run that is resumed from it goes on as if it had not been stopped."""
    training = context.training
    for rank, result in enumerate(training.results):
        if result["differing"]:
            what = ", ".join(result["differing"])
            raise Broken("checkpoint", f"worker {rank} does not get back what it saved: {what}")
        if training.twin is None:
            continue
        apart = largest_difference(result["resumed"], result["weights"])
        if not apart <= TOLERANCE:
            flight = f" with {', '.join(result['in_flight'])} in flight" if result["in_flight"] else ""
            raise Broken(
                "checkpoint",
                f"stopped after step {training.job.half}{flight} and resumed, worker {rank} ends {apart:.2g} away from "
                "a run in one go: keep all state in worker.vector(name), worker.scalars and worker.tickets",
            )


def rejoin(context: Context) -> None:
    """A worker that is killed and started again takes part again, and all end with the same weights."""
    job = context.training.job
    results = run_rejoin(dataclasses.replace(job, script="rejoin", half=max(8, job.half)))
    if not results[-1]["came_back"] or not results[-1]["exchanges"]:
        raise Broken("rejoin", "the worker that was killed and started again made no exchange")
    for rank, result in enumerate(results):
        if result["weights"] != results[0]["weights"] or not all(map(math.isfinite, result["weights"])):
            raise Broken("rejoin", f"after finish worker {rank} has other weights than worker 0")
