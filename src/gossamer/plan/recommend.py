"""From machines and a task to a ranking, a verdict in one sentence and the command for the winner."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gossamer.methods import find
from gossamer.plan.closed_form import Scene
from gossamer.plan.machines import Machines
from gossamer.plan.predict import Candidate, Prediction, candidates, ddp_step_s, predict

MIXES_WELL = 0.95
"""Plans that leave more than this share of a disagreement per step are shown, but not recommended: those that average
less than an exact mean of all every twenty steps would."""

PAYS = 1.05
"""A plan has to be so many times faster than all-reduce to be worth changing anything."""

SAME = 0.02
"""Step times that differ by less are the same: the plan that averages better wins."""

UNNAMED = "TASK.py"
"""Stands for the task where only the model's size is known."""

RUNS, RUNS_OF_MANY, MANY = 16, 4, 256
"""Simulated runs per candidate, and fewer of them from so many workers on."""


@dataclass(frozen=True)
class Workload:
    """What is to be trained."""

    task: str
    parameters: int
    optimizer: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of ``gossamer train``, for the command."""


@dataclass(frozen=True)
class Plan:
    """The outcome."""

    machines: Machines
    job: Workload
    ranking: list[Prediction]
    baselines: dict[int, Prediction]
    """All-reduce, by number of workers."""
    ddp_s: dict[int, float]
    """What DDP takes at best, by number of workers."""
    winner: Prediction
    verdict: str
    command: str
    notes: list[str]
    mixing: float
    seconds: float

    def speedup(self, prediction: Prediction) -> float:
        """Over all-reduce on as many workers."""
        return self.baselines[prediction.workers].step_s / prediction.step_s

    def why_not(self, prediction: Prediction) -> str:
        """Why a plan is not recommended however fast it is; empty if it may be."""
        preferred = find(prediction.candidate.method).preferred_optimizer
        if prediction.contraction > self.mixing:
            return "hardly averages"
        if preferred and not self.job.optimizer.startswith(preferred):
            return f"needs {preferred}"
        if self.machines.memory_bytes and prediction.memory_bytes > self.machines.memory_bytes:
            return "does not fit in memory"
        return ""

    def document(self) -> dict[str, Any]:
        """The plan as plain data, for JSON."""
        return {
            "task": self.job.task,
            "parameters": self.job.parameters,
            "ranking": [self._row(each) for each in self.ranking],
            "ddp_step_s": {str(workers): seconds for workers, seconds in self.ddp_s.items()},
            "verdict": self.verdict,
            "command": self.command,
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def _row(self, each: Prediction) -> dict[str, Any]:
        return {
            "method": each.candidate.method,
            "topology": each.candidate.topology,
            "period": each.candidate.period,
            "options": dict(each.candidate.options),
            "workers": each.workers,
            "step_s": each.step_s,
            "interval_s": list(each.interval_s),
            "speedup": self.speedup(each),
            "bound_by": each.bound_by,
            "bytes_per_step": each.bytes_per_step,
            "memory_bytes": each.memory_bytes,
            "contraction": each.contraction,
            "late_steps": each.late_steps,
            "not_recommended": self.why_not(each) or None,
        }


def make_plan(
    machines: Machines,
    job: Workload,
    *,
    workers: Sequence[int] = (),
    methods: Sequence[str] = (),
    topologies: Sequence[str] = (),
    only: Sequence[Candidate] = (),
    mixing: float = MIXES_WELL,
    seed: int = 0,
) -> Plan:
    """Predict every candidate and rank them: those that may be recommended first, the fastest of them first.

    ``only``: these candidates, instead of all that there are of some methods and topologies.
    """
    began = time.perf_counter()
    ranking: list[Prediction] = []
    baselines: dict[int, Prediction] = {}
    ddp: dict[int, float] = {}
    notes: dict[str, None] = {}
    for count in workers or (machines.workers,):
        these = machines.with_workers(count)
        runs = 1 if _certain(these) else RUNS if count < MANY else RUNS_OF_MANY
        scene = Scene(these, job.parameters, seed=seed, num_runs=runs)
        baselines[count] = predict(scene, Candidate("allreduce", "complete", {}))
        ddp[count] = ddp_step_s(scene)
        for candidate in only or candidates(count, these.nodes, methods, topologies):
            ranking.append(baselines[count] if candidate.method == "allreduce" else predict(scene, candidate))
        notes |= scene.times.notes
        if machines.measured and count > machines.workers:
            notes[f"{count} workers: measured with {machines.workers}; new ones are taken to be like them"] = None
    plan = Plan(machines, job, [], baselines, ddp, next(iter(baselines.values())), "", "", [], mixing, 0.0)
    ranked = _ranked(plan, ranking)
    winner = _winner(plan, ranked)
    return Plan(
        machines=machines,
        job=job,
        ranking=ranked,
        baselines=baselines,
        ddp_s=ddp,
        winner=winner,
        verdict=_verdict(plan, ranked, winner),
        command=command(machines.with_workers(winner.workers), job, winner),
        notes=[f"extrapolates: {note}" for note in notes],
        mixing=mixing,
        seconds=time.perf_counter() - began,
    )


def _certain(machines: Machines) -> bool:
    """Whether every run would come out alike."""
    compute = machines.compute
    return not (compute.spread or compute.sample_s or any(table.spread for table in machines.tables))


def _cost(prediction: Prediction) -> float:
    """Seconds per gradient: with several numbers of workers, what a step is worth differs."""
    return prediction.step_s / prediction.workers


def _ranked(plan: Plan, ranking: list[Prediction]) -> list[Prediction]:
    least = min(map(_cost, ranking))

    def place(each: Prediction) -> tuple[bool, int, float, float]:
        # Times that are the same for all practical purposes stand in the order of their mixing.
        about = math.floor(math.log(_cost(each) / least) / math.log1p(SAME) + 0.5)
        return bool(plan.why_not(each)), about, round(each.contraction, 3) + each.late_steps, each.bytes_per_step

    return sorted(ranking, key=place)


def _winner(plan: Plan, ranked: list[Prediction]) -> Prediction:
    """The best that may be recommended, if it heartbeats all-reduce by enough; all-reduce otherwise."""
    best = ranked[0]
    baseline = plan.baselines[best.workers]
    pays = baseline.step_s / best.step_s >= PAYS
    return best if pays and not plan.why_not(best) else baseline


def _verdict(plan: Plan, ranked: list[Prediction], winner: Prediction) -> str:
    baseline = plan.baselines[winner.workers]
    ddp = plan.ddp_s[winner.workers]
    if winner.candidate.method != "allreduce":
        where = f" over {winner.candidate.topology}" if winner.candidate.over_a_graph else ""
        if ddp > 0.98 * baseline.step_s:
            hidden = ""
        elif ddp / winner.step_s >= PAYS:
            hidden = f", {ddp / winner.step_s:.2f}× DDP at its best"
        else:
            hidden = f"; DDP at its best takes {milliseconds(ddp)}, so whoever is on it may stay"
        return (
            f"Take {winner.candidate.label}{where}: {milliseconds(winner.step_s)} per step, "
            f"{plan.speedup(winner):.2f}× all-reduce ({milliseconds(baseline.step_s)}, bound by {baseline.bound_by})"
            f"{hidden}."
        )
    others = [each for each in ranked if not plan.why_not(each) and each.candidate.method != "allreduce"]
    if not others:
        return f"Stay on all-reduce: {milliseconds(baseline.step_s)} per step, and nothing else averages well enough."
    return (
        f"Stay on all-reduce: {milliseconds(baseline.step_s)} per step, bound by {baseline.bound_by}; "
        f"the best of the others, {others[0].candidate.label}, would take {milliseconds(others[0].step_s)}."
    )


def milliseconds(seconds: float) -> str:
    """A step's time as a person says it."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def command(machines: Machines, job: Workload, winner: Prediction) -> str:
    """The command that trains with the winner on these machines."""
    candidate = winner.candidate
    options: dict[str, Any] = {"task": job.task, **job.options, "method": candidate.method}
    if candidate.over_a_graph:
        options["topology"] = candidate.topology
    options |= candidate.options
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", _said(value))]
    if machines.nodes == 1:
        return shlex.join(["gossamer", "train", *given, "--workers", str(winner.workers)])
    start = ["torchrun", "--nnodes", str(machines.nodes), "--nproc-per-node", str(machines.per_node)]
    if "alternating" in candidate.topology:
        given += ["--nodes", str(machines.nodes)]
    start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    return shlex.join([*start, "-m", "gossamer", "train", *given])


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
