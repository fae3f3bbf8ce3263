"""``--method auto``: what ``gossamer train`` does before it knows its method."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from gossamer.config import resolve
from gossamer.errors import InputError
from gossamer.plan import clusterfile, local
from gossamer.plan.auto import AUTO, SECONDS, Choice, choose
from gossamer.plan.machines import Machines
from gossamer.plan.recommend import Job, make_plan
from gossamer.process.place import Place
from gossamer.seeds import stream
from gossamer.train.job import Job as TrainJob
from gossamer.train.order import DEFAULT_WORKERS, Order, real_settings
from gossamer.train.pace import Pace


def settled(values: dict[str, Any], place: Place | None) -> dict[str, Any]:
    """The settings with a method in the place of ``auto``; as they were if they name one."""
    if values.get("method") != AUTO:
        return values
    if "topology" in values:
        raise InputError("--method auto chooses the topology too: leave --topology out, or name a method")
    basis = {**values, "method": "allreduce"}
    machines, choice = _probed_here(basis) if place is None else _probed_together(basis, place)
    candidate = choice.candidate
    chosen = {**values, "method": candidate.method, **candidate.options}
    if candidate.over_a_graph:
        chosen["topology"] = candidate.topology
        if machines.per_node > 1 and machines.nodes > 1:
            chosen["nodes"] = machines.nodes
    if place is None or place.rank == 0:
        print(f"auto: {choice.verdict}", file=sys.stderr, flush=True)
    return chosen


def _probed_here(values: dict[str, Any]) -> tuple[Machines, Choice]:
    """Probe with workers started here, and plan."""
    # What is wrong with the settings is said before any process is started.
    (settings,) = real_settings(values, None)
    workers = int(settings.get("workers", DEFAULT_WORKERS))
    (run,) = resolve(settings)
    given = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory(prefix="gossamer-") as scrap:
        file = Path(scrap) / "cluster.toml"
        print(f"auto: probing for about {SECONDS:g} s", file=sys.stderr, flush=True)
        code = local.launch(
            ["probe", *given, "--workers", str(workers), "--seconds", f"{SECONDS:g}", "--out", str(file), "--json"],
            workers,
            quiet=True,
        )
        if code != 0 or not file.exists():
            raise InputError("--method auto could not measure these workers: name a method")
        machines = clusterfile.read(file)
    plan = make_plan(machines, Job(run.task.name, machines.parameters, run.config.optimizer))
    return machines, Choice(plan.winner.candidate, plan.verdict, machines)


def _probed_together(values: dict[str, Any], place: Place) -> tuple[Machines, Choice]:
    """Probe as one of the workers that others have started, and plan."""
    (settings,) = real_settings(values, place.workers)
    order = Order(settings)
    run = order.run()
    rng = stream(run.config.seed, "compute", place.rank)
    pace = Pace(order.compute(place.workers), order.waits, place.rank, rng, threading.Event())
    choice = choose(place, TrainJob(run, place.rank), pace.keep, run.config.optimizer, knows_nodes=True)
    return choice.machines, choice
