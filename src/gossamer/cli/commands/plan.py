"""``gossamer plan``: predict every method on a cluster, and recommend one."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gossamer import tasks
from gossamer.cli.arguments import PLAN_BUDGET
from gossamer.cli.options import parse_number
from gossamer.cli.output import print_json, print_note, print_table
from gossamer.config import RunConfig, find_methods
from gossamer.errors import InputError, unknown
from gossamer.hardware import parse_duration
from gossamer.plan import cluster_file
from gossamer.plan.cluster_spec import ClusterSpec
from gossamer.plan.predict import Prediction
from gossamer.plan.quality import QualityPlan, make_quality_plan
from gossamer.plan.recommend import UNNAMED_TASK, Plan, Workload, make_plan, milliseconds
from gossamer.plan.target import parse_target
from gossamer.plan.verify import Check, measure, num_steps, replica_settings, to_verify, train_settings
from gossamer.plan.what_if import apply_change
from gossamer.process.store.rank_info import RankInfo, started_rank_info
from gossamer.replica_time import INSIDE
from gossamer.report.formats import NOTHING, counted, duration, size
from gossamer.settings import from_values
from gossamer.tasks import TaskConfig

TRAIN_OPTIONS = (*(field.name for field in dataclasses.fields(TaskConfig)), "optimizer", "batch", "wire")
"""Options that are passed on to the recommended command."""

VERIFY_OPTIONS = ("task", *TRAIN_OPTIONS, "compute", "straggler")
"""Options that are passed on to the runs of ``--verify``."""


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    if not parsed.cluster:
        raise InputError("--cluster is missing: give a cluster file; gossamer probe writes one, or write it by hand")
    spec = cluster_file.read(Path(parsed.cluster))
    job = _workload(parsed, spec)
    options = {
        "methods": _methods(parsed.method),
        "topologies": _names(parsed.topology),
        "max_contraction": parse_number(parsed.mixing, "--mixing", float, 0.0, 1.0),
        "seed": parse_number(parsed.seed, "--seed", int, 0),
    }
    workers = [parse_number(count, "--workers", int, 1) for count in _names(parsed.workers)]
    before = None
    if parsed.what_if is not None:
        before = make_plan(spec, job, **options)
        scenario = apply_change(parsed.what_if, spec, job.parameters)
        spec, job = scenario.spec, dataclasses.replace(job, parameters=scenario.parameters)
    options["replicas"] = _replicas(parsed, spec)
    plan = make_plan(spec, job, workers=workers, **options)
    if spec.parameters and abs(job.parameters - spec.parameters) > 0.01 * spec.parameters:
        plan.notes.append(
            f"compute times are those of a model of {spec.parameters} parameters, not of {job.parameters}: "
            "change them with --what-if compute=…, or probe with this task"
        )
    rank_info = started_rank_info() if parsed.verify else None
    checks = _verify(plan, parsed, rank_info) if parsed.verify else []
    if rank_info is not None and rank_info.rank != 0:
        return 0
    crossings = []
    if parsed.plot is not None:
        from gossamer.plan.plot import draw

        crossings = draw(plan, Path(parsed.plot), _methods(parsed.method), _names(parsed.topology))
    quality = _quality(plan, parsed)
    if parsed.json:
        document = plan.document()
        if quality is not None:
            document["quality"] = quality.document()
        if before is not None:
            document |= {"what_if": parsed.what_if, "before": {"verdict": before.verdict, "command": before.command}}
        if parsed.plot is not None:
            document |= {"plot": parsed.plot, "crossings": crossings}
        if parsed.verify:
            document["verified"] = [check.document() for check in checks]
        print_json(document)
        return 0
    _show(plan, parse_number(parsed.top, "--top", int, 0))
    print()
    if quality is not None:
        _show_quality(quality)
        print_note(quality.verdict)
        print(f"\n  {plan.command_of(quality.winner.prediction)}\n")
        return 0
    if before is not None:
        print_note(f"Now: {before.verdict}")
        print_note(f"With {parsed.what_if}: {plan.verdict}")
    else:
        print_note(plan.verdict)
    print(f"\n  {plan.command}\n")
    for note in plan.notes:
        print_note(f"note: {note}")
    if checks:
        _show_checks(checks)
    for sentence in crossings:
        print(sentence)
    if parsed.plot is not None:
        print(f"drawn to {parsed.plot}")
    return 0


def _workload(parsed: argparse.Namespace, spec: ClusterSpec) -> Workload:
    options = {name: getattr(parsed, name) for name in TRAIN_OPTIONS if getattr(parsed, name) is not None}
    if parsed.task is None:
        if parsed.parameters is None and not spec.parameters:
            raise InputError("--task is missing: name a task, or give the model's size as --parameters")
        parameters = spec.parameters
        optimizer = parsed.optimizer or RunConfig.optimizer
    else:
        # The number of workers does not change the model.
        task = tasks.build(parsed.task, workers=1, seed=0, config=from_values(TaskConfig, options))
        parameters = _count_parameters(task.model)
        optimizer = parsed.optimizer or str(task.defaults.get("optimizer", RunConfig.optimizer))
    if parsed.parameters is not None:
        parameters = round(parse_number(parsed.parameters, "--parameters", float, 1.0))
    return Workload(parsed.task or UNNAMED_TASK, parameters, optimizer.lower(), options)


def _count_parameters(model: Any) -> int:
    """Count a model's parameters, without allocating them if it can be built on the meta device."""
    try:
        with torch.device("meta"):
            built = model()
    except (NotImplementedError, RuntimeError):
        built = model()
    return sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)


def _verify(plan: Plan, parsed: argparse.Namespace, rank_info: RankInfo | None) -> list[Check]:
    if parsed.task is None:
        raise InputError("--verify needs a task to train: give it as --task")
    nodes, planned = plan.spec.nodes, plan.winner.ranks
    if rank_info is None and nodes > 1:
        raise InputError(
            f"--verify needs the {nodes} nodes of the cluster file: start gossamer plan there with torchrun"
        )
    if rank_info is not None and rank_info.workers != planned:
        raise InputError(f"--verify needs {planned} workers, as planned, but {rank_info.workers} were started")
    settings = {name: getattr(parsed, name) for name in VERIFY_OPTIONS if getattr(parsed, name) is not None}
    if nodes > 1 and plan.spec.per_node > 1:
        settings["nodes"] = nodes
    checks = []
    for number, prediction in enumerate(to_verify(plan)):
        candidate = prediction.candidate
        print(f"verify: {prediction.label} over {candidate.topology}", file=sys.stderr, flush=True)
        values = train_settings(candidate, settings, num_steps(prediction.step_s, candidate))
        values |= {"workers": prediction.workers, **replica_settings(prediction)}
        measured = measure(values, rank_info, f"verify{number}")
        if measured is not None:
            checks.append(Check(prediction, measured))
    return checks


QUALITY_OPTIONS = ("task", *TRAIN_OPTIONS, "lr", "partition", "schedule")
"""Options that are passed on to the trials of ``--until``."""


def _quality(plan: Plan, parsed: argparse.Namespace) -> QualityPlan | None:
    """Return the plan for the target of --until; None if there is none."""
    unused = [name for name in ("budget", "lr", "partition", "schedule") if getattr(parsed, name) is not None]
    if parsed.until is None:
        if unused:
            raise InputError(f"--{unused[0]} is for --until, which is missing: give a target, such as accuracy=0.9")
        return None
    target = parse_target(parsed.until)
    if parsed.task is None:
        raise InputError("--until needs a task to train: give it as --task")
    if len(plan.baselines) > 1:
        raise InputError("--until compares plans for one number of workers: give one with --workers")
    budget_s = parse_duration(parsed.budget or PLAN_BUDGET, "--budget")
    settings = {name: getattr(parsed, name) for name in QUALITY_OPTIONS if getattr(parsed, name) is not None}

    def say(text: str) -> None:
        if not parsed.json:
            print(f"until {target}: {text}", file=sys.stderr, flush=True)

    return make_quality_plan(plan, settings, target, budget_s, say)


def _replicas(parsed: argparse.Namespace, spec: ClusterSpec) -> list[tuple[int, str]]:
    """Return the sizes of replicas to plan for, and what is inside of them."""
    if parsed.inside is not None and parsed.inside not in INSIDE:
        raise unknown("value for --inside", parsed.inside, INSIDE)
    if parsed.replica_size is None and spec.replica is None:
        if parsed.inside is not None:
            raise InputError("--inside is for replicas: give --replica-size too, a number or auto")
        return [(1, "")]
    for name in ("until", "plot"):
        if getattr(parsed, name) is not None:
            raise InputError(f"--{name} does not plan for replicas yet: leave it out, or --replica-size")
    if parsed.wire not in (None, "float32"):
        raise InputError("--wire does not work with --replica-size yet: leave it out")
    per_node = spec.ranks // spec.nodes
    if parsed.replica_size == "auto":
        sizes = [size for size in range(1, per_node + 1) if per_node % size == 0]
    elif parsed.replica_size is None and spec.replica is not None:
        sizes = [spec.replica.ranks]
    else:
        sizes = [parse_number(parsed.replica_size, "--replica-size", int, 1)]
    inside = INSIDE if parsed.inside is None else (parsed.inside,)
    if parsed.inside is None and spec.replica is not None and parsed.replica_size is None:
        inside = (spec.replica.inside,)
    return [(size, kind) for size in sizes for kind in (inside if size > 1 else ("",))]


def _show_quality(quality: QualityPlan) -> None:
    baseline, rows = quality.baseline, []
    for trial in quality.trials:
        reached, price = trial.reached, trial.price(baseline)
        if reached is None:
            steps, seen = "diverges" if trial.diverged else "not seen", ""
        else:
            steps = f"{reached.steps:.0f}"
            how = "extrapolated" if reached.extrapolated else "reached"
            seen = f"{how}, {reached.low:.0f} to {reached.high:.0f}"
        rows.append(
            [
                trial.prediction.candidate.label,
                trial.prediction.candidate.topology,
                milliseconds(trial.prediction.step_s),
                steps,
                seen,
                NOTHING if price is None else f"{price:.2f}×",
                NOTHING if reached is None else duration(trial.time_s),
            ]
        )
    title = f"until {quality.target}, after {duration(quality.seconds)} of training in the virtual cluster"
    print_table(title, ["method", "topology", "step", "steps", "how", "price", "time"], rows)
    print()
    print_note(
        "step: predicted; steps: of each worker, to the target; price: steps over those of all-reduce; "
        "time: step times steps."
    )


def _show_checks(checks: list[Check]) -> None:
    rows = [
        [
            check.prediction.label,
            check.prediction.candidate.topology,
            milliseconds(check.prediction.step_s),
            milliseconds(check.measured_s),
            f"{100 * check.error:+.1f}%",
        ]
        for check in checks
    ]
    print_table("verified", ["method", "topology", "predicted", "measured", "error"], rows)


def _methods(text: str | None) -> list[str]:
    names = _names(text)
    if names:
        find_methods(",".join(names))  # raises if there is none of a name
    return names


def _names(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",") if name.strip()]


COLUMNS = {
    "method": "",
    "topology": "",
    "workers": "",
    "step": "predicted time",
    "interval": "of nine runs in ten",
    "speed": "over all-reduce",
    "bound by": "the bottleneck of a step",
    "sent": "bytes per worker and step",
    "memory": "extra, per worker",
    "contraction": "of the workers' disagreement per step: 0 is exact averaging, 1 is none",
    "": "",
}


def _show(plan: Plan, top: int) -> None:
    several = len(plan.baselines) > 1
    rows = plan.ranking[: top or None]
    # All-reduce, the baseline, is always listed.
    rows += [each for each in plan.baselines.values() if each not in rows and each in plan.ranking]
    spec, job = plan.spec, plan.job
    what = "worker" if len({each.replica_size for each in plan.predictions}) == 1 and not rows[0].replica else "rank"
    nodes = f"{counted(spec.nodes, 'node')} of {counted(spec.ranks // spec.nodes, what)}"
    shown = [name for name in COLUMNS if name != "workers" or several]
    task = "" if job.task == UNNAMED_TASK else f"{job.task}, "
    title = f"{task}{job.parameters / 1e6:.3g} M parameters, {nodes}"
    cells = [{**_cells(plan, each), "workers": f"{each.workers}"} for each in rows]
    left_out = print_table(
        title, shown, [[row[name] for name in shown] for row in cells], optional=["memory", "interval", "sent"]
    )
    print()
    meanings = "; ".join(f"{name}: {text}" for name, text in COLUMNS.items() if text and name not in left_out)
    rest = len(plan.ranking) - len(rows)
    print_note(f"{meanings}. {rest} more with --top 0." if rest > 0 else f"{meanings}.")


def _cells(plan: Plan, prediction: Prediction) -> dict[str, str]:
    low, high = prediction.interval_s
    late = f"gradients {prediction.late_steps:.0f} steps late" if prediction.late_steps else ""
    return {
        "method": prediction.label,
        "topology": prediction.candidate.topology,
        "step": milliseconds(prediction.step_s),
        "interval": f"{1e3 * low:.3g}–{1e3 * high:.3g} ms",
        "speed": f"{plan.speedup(prediction):.2f}×",
        "bound by": prediction.bound_by,
        "sent": size(prediction.bytes_per_step),
        "memory": size(prediction.memory_bytes),
        "contraction": f"{prediction.contraction:.2f}",
        "": plan.objection(prediction) or late,
    }
