"""Predict what each method would do on a cluster, and recommend one."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gossamer import tasks
from gossamer.cli.output import counted, print_json, print_note, print_table, size
from gossamer.config import RunConfig
from gossamer.errors import InputError
from gossamer.methods import find
from gossamer.plan import cluster_file
from gossamer.plan.machines import Machines
from gossamer.plan.predict import Prediction
from gossamer.plan.recommend import MIXES_WELL, UNNAMED, Plan, Workload, make_plan, milliseconds
from gossamer.plan.verify import Check, chosen, measure, num_steps, settings_of
from gossamer.plan.what_if import EXAMPLES, change
from gossamer.process.store.rank_info import RankInfo, started_rank_info
from gossamer.settings import from_values
from gossamer.tasks import TaskConfig

SHOWN = 12

CARRIED = (*(field.name for field in dataclasses.fields(TaskConfig)), "optimizer", "batch")
"""Options that go on to the command that is recommended."""

VERIFIED = ("task", *CARRIED, "compute", "straggler")
"""Options that go on to the runs that verify it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cluster", metavar="FILE", help="the cluster: written by gossamer probe, or by hand")
    add("--task", metavar="TEXT", help="what to train: a task's name, or a Python file that defines one")
    for field in dataclasses.fields(TaskConfig):
        add(f"--{field.name}", metavar="X", help=field.metadata["help"])
    add("--optimizer", metavar="TEXT", help="the optimizer; methods that need another are not recommended")
    add("--batch", metavar="N", help="samples per mini-batch, for the command")
    add("--parameters", metavar="N", help="the model's size, instead of a task")
    add("--workers", metavar="N,…", help="how many workers; several are compared (default: as in the file)")
    add("--method", metavar="NAME,…", help="only these methods (default: all)")
    add("--topology", metavar="NAME,…", help="only these topologies (default: all that fit)")
    add(
        "--mixing",
        metavar="X",
        default=str(MIXES_WELL),
        help=f"do not recommend plans that leave more of a disagreement per step (default: {MIXES_WELL})",
    )
    add("--what-if", metavar="CHANGE", help=f"change one thing first: {', '.join(EXAMPLES.values())}")
    add("--top", metavar="N", default=str(SHOWN), help=f"how many rows to print; 0: all (default: {SHOWN})")
    add("--plot", metavar="FILE", help="draw step time over workers and over bandwidth into a .png, .svg or .pdf file")
    add("--verify", action="store_true", help="run the best few for real, here or under torchrun, and show the errors")
    add("--compute", metavar="TEXT", help="for --verify: least time of one gradient, as for gossamer train")
    add("--straggler", metavar="RANK:FACTOR,…", help="for --verify: slow workers, as for gossamer train")
    add("--seed", metavar="N", default="0", help="for what is drawn at random (default: 0)")
    add("--json", action="store_true", help="print one JSON document")


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    if not parsed.cluster:
        raise InputError("--cluster is missing: give a cluster file; gossamer probe writes one, or write it by hand")
    machines = cluster_file.read(Path(parsed.cluster))
    job = _job(parsed, machines)
    asked = {
        "methods": [find(name).name for name in _names(parsed.method)],
        "topologies": _names(parsed.topology),
        "mixing": _number(parsed.mixing, "--mixing", float, 0.0, 1.0),
        "seed": _number(parsed.seed, "--seed", int, 0),
    }
    workers = [_number(count, "--workers", int, 1) for count in _names(parsed.workers)]
    before = None
    if parsed.what_if is not None:
        before = make_plan(machines, job, **asked)
        changed = change(parsed.what_if, machines, job.parameters)
        machines, job = changed.machines, Workload(job.task, changed.parameters, job.optimizer, job.options)
    plan = make_plan(machines, job, workers=workers, **asked)
    plan.notes.extend(_more_notes(plan))
    rank_info = started_rank_info() if parsed.verify else None
    checks = _verify(plan, parsed, rank_info) if parsed.verify else []
    if rank_info is not None and rank_info.rank != 0:
        return 0
    pictures = _draw(plan, parsed)
    if parsed.json:
        document = plan.document()
        if before is not None:
            document |= {"what_if": parsed.what_if, "before": {"verdict": before.verdict, "command": before.command}}
        if parsed.plot is not None:
            document |= {"plot": parsed.plot, "crossings": pictures}
        if parsed.verify:
            document["verified"] = [check.document() for check in checks]
        print_json(document)
        return 0
    _show(plan, _number(parsed.top, "--top", int, 0))
    print()
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
    for words in pictures:
        print(words)
    if parsed.plot is not None:
        print(f"drawn to {parsed.plot}")
    return 0


def _job(parsed: argparse.Namespace, machines: Machines) -> Workload:
    options = {name: getattr(parsed, name) for name in CARRIED if getattr(parsed, name) is not None}
    if parsed.task is None:
        if parsed.parameters is None and not machines.parameters:
            raise InputError("--task is missing: say what is to be trained, or give the model's size as --parameters")
        parameters = machines.parameters
        optimizer = parsed.optimizer or RunConfig.optimizer
    else:
        # Built with few workers: how many there will be does not change the model.
        task = tasks.build(parsed.task, workers=1, seed=0, config=from_values(TaskConfig, options))
        parameters = _count_parameters(task.model)
        optimizer = parsed.optimizer or str(task.defaults.get("optimizer", RunConfig.optimizer))
    if parsed.parameters is not None:
        parameters = round(_number(parsed.parameters, "--parameters", float, 1.0))
    return Workload(parsed.task or UNNAMED, parameters, optimizer.lower(), options)


def _count_parameters(model: Any) -> int:
    """A model's size, without the memory for it."""
    try:
        with torch.device("meta"):
            made = model()
    except (NotImplementedError, RuntimeError):
        made = model()
    return sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)


def _more_notes(plan: Plan) -> list[str]:
    measured = plan.machines.parameters
    notes = []
    if measured and abs(plan.job.parameters - measured) > 0.01 * measured:
        notes.append(
            f"compute times are those of a model of {measured} parameters, not of {plan.job.parameters}: "
            "change them with --what-if compute=…, or probe with this task"
        )
    return notes


def _draw(plan: Plan, parsed: argparse.Namespace) -> list[str]:
    if parsed.plot is None:
        return []
    from gossamer.plan.plot import draw

    return draw(plan, Path(parsed.plot), _names(parsed.method), _names(parsed.topology))


def _verify(plan: Plan, parsed: argparse.Namespace, rank_info: RankInfo | None) -> list[Check]:
    """Run what is worth running for real."""
    if parsed.task is None:
        raise InputError("--verify needs something to train: give it as --task")
    nodes, planned = plan.machines.nodes, plan.winner.workers
    if rank_info is None and nodes > 1:
        raise InputError(
            f"--verify needs the {nodes} nodes of the cluster file: start gossamer plan there with torchrun"
        )
    if rank_info is not None and rank_info.workers != planned:
        raise InputError(f"--verify needs {planned} workers, as planned, but {rank_info.workers} were started")
    settings = {name: getattr(parsed, name) for name in VERIFIED if getattr(parsed, name) is not None}
    if plan.machines.nodes > 1 and plan.machines.per_node > 1:
        settings["nodes"] = plan.machines.nodes
    checks = []
    for number, prediction in enumerate(chosen(plan)):
        candidate = prediction.candidate
        print(f"verify: {candidate.label} over {candidate.topology}", file=sys.stderr, flush=True)
        values = settings_of(candidate, settings, num_steps(prediction.step_s, candidate))
        measured = measure({**values, "workers": prediction.workers}, rank_info, f"verify{number}")
        if measured is not None:
            checks.append(Check(prediction, measured))
    return checks


def _show_checks(checks: list[Check]) -> None:
    rows = [
        [
            check.prediction.candidate.label,
            check.prediction.candidate.topology,
            milliseconds(check.prediction.step_s),
            milliseconds(check.measured_s),
            f"{100 * check.error:+.1f}%",
        ]
        for check in checks
    ]
    print_table("verified", ["method", "topology", "predicted", "measured", "error"], rows)


def _names(text: str | None) -> list[str]:
    return [] if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _number(text: str, flag: str, kind: type, least: float, most: float = float("inf")) -> Any:
    try:
        number = kind(text)
    except ValueError:
        raise InputError(f"{flag} is {text!r}: expected {'a whole number' if kind is int else 'a number'}") from None
    if not least <= number <= most or number == float("inf"):
        bounds = f"from {least:g} to {most:g}" if most != float("inf") else f"of {least:g} or more"
        raise InputError(f"{flag} is {text}: expected a number {bounds}")
    return number


COLUMNS = {
    "method": "",
    "topology": "",
    "workers": "",
    "step": "predicted time",
    "interval": "of nine runs in ten",
    "speed": "against all-reduce",
    "bound by": "what a step would gain most from",
    "sent": "bytes per worker and step",
    "memory": "extra, per worker",
    "contraction": "of the workers' disagreement per step: 0 is exact averaging, 1 none at all",
    "": "",
}


def _show(plan: Plan, top: int) -> None:
    several = len(plan.baselines) > 1
    rows = plan.ranking[: top or None]
    # All-reduce is what everything is compared with.
    rows += [each for each in plan.baselines.values() if each not in rows and each in plan.ranking]
    machines, job = plan.machines, plan.job
    nodes = f"{counted(machines.nodes, 'node')} of {counted(machines.per_node, 'worker')}"
    shown = [name for name in COLUMNS if name != "workers" or several]
    task = "" if job.task == UNNAMED else f"{job.task}, "
    title = f"{task}{job.parameters / 1e6:.3g} M parameters, {nodes}"
    cells = [{**_cells(plan, each), "workers": f"{each.workers}"} for each in rows]
    left_out = print_table(
        title, shown, [[row[name] for name in shown] for row in cells], spare=["memory", "interval", "sent"]
    )
    print()
    said = [f"{name}: {words}" for name, words in COLUMNS.items() if words and name not in left_out]
    rest = len(plan.ranking) - len(rows)
    print_note("; ".join(said) + f". {rest} more with --top 0." if rest > 0 else "; ".join(said) + ".")


def _cells(plan: Plan, each: Prediction) -> dict[str, str]:
    low, high = each.interval_s
    return {
        "method": each.candidate.label,
        "topology": each.candidate.topology,
        "step": milliseconds(each.step_s),
        "interval": f"{1e3 * low:.3g}–{1e3 * high:.3g} ms",
        "speed": f"{plan.speedup(each):.2f}×",
        "bound by": each.bound_by,
        "sent": size(each.bytes_per_step),
        "memory": size(each.memory_bytes),
        "contraction": f"{each.contraction:.2f}",
        "": plan.why_not(each) or (f"gradients {each.late_steps:.0f} steps late" if each.late_steps else ""),
    }
