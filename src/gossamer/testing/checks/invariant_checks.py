"""Checks of what training does, in the virtual cluster and in any order of events. A method may give up some of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.methods import Method
from gossamer.testing.checks.context import MAX_REACH, Context
from gossamer.testing.violations import Broken, NotApplicable
from gossamer.testing.worlds.quadratic import disagreement, half_square, quadratic
from gossamer.testing.worlds.virtual_runs import (
    INSTANT,
    draw_machines,
    make_cluster,
    models,
    on,
    steps_of,
    total,
    watch_steps,
    zeros,
)
from gossamer.virtual.sim.cluster import Cluster

ROUND_OFF = 1e-9
"""Sums in float64 may differ by this."""


def exchanges(context: Context) -> None:
    """Every worker communicates."""
    if not context.reach:
        graph, count = context.ring
        raise Broken("exchanges", f"somebody did not communicate twice in {MAX_REACH} steps ({graph} of {count})")


def workers(context: Context) -> None:
    """Any number of workers can train, on any topology."""
    for graph, count in (("ring", 1), ("ring", 2), ("complete", 3), ("base", 5), ("star", 7)):
        if not context.subject.fits(graph, count):
            continue
        cluster = make_cluster(context.subject, graph, count, **INSTANT)
        cluster.run_until(context.steps + 0.5)
        where = f"{count} workers, topology={graph}"
        if min(steps_of(cluster)) < context.steps:
            raise Broken("workers", f"workers made {list(steps_of(cluster))} of {context.steps} steps ({where})")
        cluster.finish()
        _check_finite("workers", cluster, where)


def alone(context: Context) -> None:
    """One worker alone does plain training: the optimizer's own steps, nothing sent."""
    for clock in ("hardware", "ideal"):
        cluster = make_cluster(context.subject, "ring", 1, clock=clock, compute="constant:1s")
        cluster.run_until(context.steps + 0.5)
        cluster.finish()
        (worker,) = cluster.workers
        expected = _plain_training(context, worker.steps_done)
        apart = float((models(cluster)[0] - expected).abs().max())
        if not apart <= ROUND_OFF:
            raise Broken(
                "alone",
                f"after {worker.steps_done} steps the model is {apart:.2g} away from plain training (clock={clock})",
            )
        if worker.bytes_sent:
            raise Broken("alone", f"it sent {worker.bytes_sent} bytes, to nobody")


def _plain_training(context: Context, steps: int) -> Tensor:
    task = quadratic(1)
    model = task.model()
    optimizer = context.subject.make_optimizer(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        half_square(model(task.train[0]), task.train[1]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def mean(context: Context) -> None:
    """The sum of all models moves only by the workers' own updates (Method.conserved)."""
    for seed in context.seeds:
        world, where = context.world(seed)
        before = _sum_of(world.workers, world.method)
        world.run()
        world.finish()
        _check_sum("mean", _sum_of(world.workers, world.method), before + world.added, where)
    for seed in context.seeds:
        machines = draw_machines(context.subject, seed)
        added = zeros()
        cluster = on(machines, context.subject, added=added)
        before = total(cluster)
        cluster.run_until(float(context.steps))
        cluster.finish()
        _check_sum("mean", total(cluster), before + added, str(machines))


def _sum_of(workers: Sequence[Any], method: Method) -> Tensor:
    return torch.stack([method.conserved(worker).clone() for worker in workers]).sum(0)


def _check_sum(rule: str, found: Tensor, expected: Tensor, where: str) -> None:
    error = float((found - expected).abs().max())
    if not error <= ROUND_OFF * max(1.0, float(expected.abs().max())):
        raise Broken(
            rule,
            f"the sum of all models is {error:.2g} away from its start plus the workers' updates ({where}); apply an "
            "answer as a displacement from what was sent, on both sides alike: x += mean − sent",
        )


def end(context: Context) -> None:
    """Training may end at any moment: finish applies what is in flight, on all workers or on none."""
    graph, count = context.ring
    hardware: dict[str, Any] = {
        "compute": "exponential:1s",
        "straggler": f"{count - 1}:5",
        "link": "48b/100ms",
        "seed": 1,
    }
    for at in _moments(context):
        where = f"{count} workers, topology={graph}, ended at {at:g} s"
        added = zeros()
        recorded = "mean" not in context.method.gives_up
        cluster = make_cluster(context.subject, graph, count, added=added if recorded else None, **hardware)
        before = total(cluster)
        cluster.run_until(at)
        cluster.finish()
        for worker in cluster.workers:
            if worker.tickets:
                raise Broken(
                    "end",
                    f"after finish worker {worker.rank} still has {', '.join(map(repr, worker.tickets))} in flight "
                    f"({where}): let finish wait for it and apply it",
                )
        if recorded:
            _check_sum("end", total(cluster), before + added, where)
        _check_finite("end", cluster, where)
        if not context.method.sends_models:
            _check_equal("end", cluster, where)


def _moments(context: Context) -> Iterator[float]:
    for number in range(1, 13):
        yield 0.37 * number + context.reach * (number % 3)


def replicas(context: Context) -> None:
    """Where only gradients travel, all workers have the same parameters after every step."""
    if context.method.sends_models:
        raise NotApplicable("models travel: workers may differ")
    for seed in context.seeds[:6]:
        machines = draw_machines(context.subject, seed)
        seen: dict[int, list[Tensor]] = {}
        method = watch_steps(
            context.subject.build(machines.graph, machines.workers, seed),
            partial(_note, seen),
        )
        cluster = on(machines, context.subject, method=method)
        cluster.run_until(float(context.steps))
        for step, found in seen.items():
            if not all(torch.equal(found[0], other) for other in found):
                raise Broken("replicas", f"after step {step + 1} workers have different parameters ({machines})")


def _note(seen: dict[int, list[Tensor]], worker: Any) -> None:
    seen.setdefault(worker.step, []).append(worker.x + 0.0)


def consensus(context: Context) -> None:
    """Workers that start apart and only average come together."""
    if not context.method.sends_models:
        raise NotApplicable("only gradients travel: without gradients there is nothing to average")
    graph, count = context.subject.first_fit(("ring", 6), context.ring)
    cluster = make_cluster(context.subject, graph, count, task=disagreement(count), clock="ideal", lr=0.0)
    start = cluster.consensus()
    for rounds in (20, 60, 200):
        cluster.run_until(float(rounds * max(2, context.reach)))
        if cluster.consensus() < 1e-3 * start:
            return
    raise Broken(
        "consensus",
        f"after {rounds * max(2, context.reach)} steps workers are still {cluster.consensus() / start:.2g} of their "
        f"first distance apart ({count} workers, topology={graph})",
    )


def optimum(context: Context) -> None:
    """All workers come to the optimum of the mean objective, each with data of its own."""
    lr, steps = context.learning
    graph, count = context.ring
    targets = quadratic(count).train[0]
    best = targets.mean(0)
    apart = (targets - best).square().sum(1).mean().sqrt()
    for clock in ("hardware", "ideal"):
        cluster = make_cluster(
            context.subject, graph, count, lr=lr, momentum=0.0, clock=clock, compute="constant:1s", link="inf"
        )
        cluster.run_until(float(steps))
        cluster.finish()
        model, where = models(cluster).mean(0), f"after {steps} steps ({graph} of {count}, clock={clock})"
        if not (model - best).norm() < 0.25 * apart:
            share = float((model - best).norm() / apart)
            raise Broken("optimum", f"the mean model is {share:.0%} of the workers' distance away from it {where}")
        if not cluster.consensus() < 0.7 * apart:
            raise Broken(
                "optimum",
                f"workers are {cluster.consensus() / float(apart):.0%} as far apart as they would be alone {where}",
            )


def _check_finite(rule: str, cluster: Cluster, where: str) -> None:
    if not torch.isfinite(models(cluster)).all():
        raise Broken(rule, f"a model is not finite ({where})")


def _check_equal(rule: str, cluster: Cluster, where: str) -> None:
    found = models(cluster)
    if not all(torch.equal(found[0], other) for other in found):
        raise Broken(rule, f"workers have different parameters ({where})")
