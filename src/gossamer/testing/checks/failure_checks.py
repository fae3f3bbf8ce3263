"""Checks of what happens when workers leave and join, in the virtual cluster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.testing.checks.context import Context
from gossamer.testing.violations import Broken, NotApplicable
from gossamer.testing.worlds.quadratic import quadratic
from gossamer.testing.worlds.virtual_runs import INSTANT, make_cluster, models, steps_of
from gossamer.virtual.sim.cluster import Cluster

SEVERAL = (("ring", 5), ("ring", 4), ("complete", 4))
"""Topologies with enough workers to lose some."""

CHANGES = (
    ("2@5.3", "", "hardware"),
    ("", "2@6.2", "ideal"),
    ("0@4.1,1@4.1", "1@8.7", "hardware"),
    ("2@3.7", "2@9.4", "ideal"),
    ("0@5,1@5,2@5", "0@9.9", "hardware"),
)
"""Who fails, who joins, and the clock."""


def failures(context: Context) -> None:
    """Training continues when workers leave and join, and nobody waits for a worker that is gone."""
    graph, count = context.subject.first_fit(*SEVERAL)
    uneven: dict[str, Any] = {"compute": "lognormal:1s,0.3", "link": "100b/10ms"}
    for fail, join, clock in CHANGES:
        where = f"{graph} of {count}, fail={fail} join={join} clock={clock}"
        _check_progress(
            context,
            make_cluster(context.subject, graph, count, clock=clock, fail=fail, join=join, **uneven),
            where,
        )
    slow: dict[str, Any] = {"compute": "lognormal:1s,0.4", "link": "50b/200ms"}
    for rank, join in ((0, "2@5.86"), (1, "2@8.2"), (2, "2@11.3")):
        where = f"{graph} of {count}, fail=2@3.1 join={join} straggler={rank}:4"
        _check_progress(
            context,
            make_cluster(context.subject, graph, count, fail="2@3.1", join=join, straggler=f"{rank}:4", **slow),
            where,
        )


def _check_progress(context: Context, cluster: Cluster, where: str) -> None:
    cluster.run_until(14.0)
    made = list(steps_of(cluster))
    cluster.run_until(30.0 + 3.0 * context.reach)
    stuck = [
        worker.rank
        for worker, before in zip(cluster.workers, made, strict=True)
        if worker.alive and worker.steps_done <= before
    ]
    if stuck:
        raise Broken("failures", f"worker {stuck[0]} made no step any more ({where})")
    cluster.finish()
    found = models(cluster)
    if not torch.isfinite(found).all():
        raise Broken("failures", f"a model is not finite ({where})")
    if not context.method.sends_models and not all(torch.equal(found[0], other) for other in found):
        raise Broken("failures", f"workers have different parameters at the end ({where})")


def shared(context: Context) -> None:
    """Vectors that are equal on all workers are declared as shared, so that a worker that joins copies them."""
    if not context.method.lockstep:
        raise NotApplicable("workers are at different steps")
    graph, count = context.subject.first_fit(*SEVERAL)
    fails = context.reach + 0.5
    until = fails + 5.0 + 2 * context.reach
    equal = _equal_vectors(make_cluster(context.subject, graph, count, **INSTANT), until)
    cluster = make_cluster(context.subject, graph, count, **INSTANT, fail=f"2@{fails:g}", join=f"2@{fails + 2.5:g}")
    cluster.run_until(until)
    # The model last: it differs because something else does.
    for name in sorted(equal, key=lambda name: (name == MODEL, name)):
        mine, other = (_vectors(cluster, rank).get(name) for rank in (2, 1))
        if mine is None or other is None or not torch.allclose(mine, other, rtol=0, atol=1e-9):
            what = "worker.x" if name == MODEL else f"vector {name!r}"
            hint = "" if name in context.method.shared else f"; shared is {context.method.shared!r}"
            raise Broken(
                "shared",
                f"{what} is equal on all workers, but not after worker 2 has left and come back "
                f"({graph} of {count}){hint}: name there all that is equal on all workers, scalars too",
            )
    for name in context.method.shared:
        found = [_vectors(cluster, rank).get(name) for rank in cluster.alive()]
        if any(vector is not None for vector in found) and name not in equal and _changes(found):
            raise Broken("shared", f"vector {name!r} is declared as shared, but differs between workers")


MODEL = "x"


def _vectors(cluster: Cluster, rank: int) -> dict[str, Tensor]:
    worker = cluster.workers[rank]
    return {MODEL: worker.x + 0.0, **{name: worker.vector(name) + 0.0 for name in worker.vectors}}


def _equal_vectors(cluster: Cluster, until: float) -> set[str]:
    """Return the names of the vectors that change, and are equal on all workers at every moment."""
    equal: set[str] | None = None
    changed: set[str] = set()
    before: dict[str, Tensor] = {}
    for time in range(1, int(until) + 1):
        cluster.run_until(time + 0.25)
        vectors = [_vectors(cluster, worker.rank) for worker in cluster.workers]
        names = {name for name in vectors[0] if all(name in other for other in vectors)}
        same = {name for name in names if all(torch.equal(vectors[0][name], other[name]) for other in vectors)}
        changed |= {name for name in names & before.keys() if not torch.equal(vectors[0][name], before[name])}
        # A vector that does not exist yet is equal everywhere.
        equal = same if equal is None else (equal | (same - before.keys())) & (same | (equal - names))
        before = vectors[0]
    return (equal or set()) & changed


def _changes(found: list[Tensor | None]) -> bool:
    present = [vector for vector in found if vector is not None]
    return any(not torch.equal(present[0], other) for other in present)


def joiner(context: Context) -> None:
    """A worker that joins contributes: the model moves towards its data."""
    graph, count = context.subject.first_fit(("complete", 4), ("ring", 4))
    lr, steps = context.learning
    targets = quadratic(count).train[0]
    of_all, of_others = targets.mean(0), targets[:-1].mean(0)
    for join, best in (("", of_others), (f"{count - 1}@{steps / 10:g}", of_all)):
        cluster = make_cluster(
            context.subject, graph, count, lr=lr, momentum=0.0, **INSTANT, fail=f"{count - 1}@0", join=join
        )
        cluster.run_until(float(steps))
        cluster.finish()
        away = float((models(cluster).mean(0) - best).norm() / (of_all - of_others).norm())
        if not away < 0.5:
            who = "the others'" if join else "its"
            raise Broken(
                "joiner",
                f"after {steps} steps the mean model is {away:.0%} of the way off: {who} data count too much "
                f"({graph} of {count}, join={join})",
            )
