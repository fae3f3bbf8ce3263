"""Rank all candidates on a cluster and recommend one: a verdict in one sentence, and the command to train with."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gossamer.methods import find
from gossamer.methods.a2cid2 import A2CiD2
from gossamer.methods.divisible import Divisible
from gossamer.methods.gossip import Gossip
from gossamer.methods.loading.method_contract import is_encodable
from gossamer.plan.cluster_spec import ClusterSpec
from gossamer.plan.predict import Candidate, Prediction, candidates, ddp_step_s, predict
from gossamer.plan.runtime_model.cluster_model import ClusterModel
from gossamer.topology import uses_nodes

BASELINE = "allreduce"

MAX_CONTRACTION = 0.95
"""Candidates with a larger contraction are listed, but not recommended: they average less than an exact mean of all
workers every twenty steps does."""

MIN_SPEEDUP = 1.05
"""Over all-reduce, for a recommendation."""

MAX_RESTARTS = 3
"""Of each replica, in the command that starts them."""

SAME_TIME = 0.02
"""Relative difference below which step times count as equal, and the better contraction decides."""

UNNAMED_TASK = "TASK.py"
"""Stands for the task in the command if only the model's size is known."""

NUM_RUNS, NUM_RUNS_MANY_WORKERS, MANY_WORKERS = 16, 4, 256
"""Simulated runs per candidate; fewer from ``MANY_WORKERS`` workers on."""


@dataclass(frozen=True)
class Workload:
    task: str
    parameters: int
    optimizer: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other options of ``gossamer train``, for the command."""

    @property
    def wire(self) -> str:
        return str(self.options.get("wire", "float32"))


@dataclass(frozen=True)
class Plan:
    spec: ClusterSpec
    job: Workload
    predictions: list[Prediction]
    baselines: dict[int, Prediction]
    """All-reduce among workers of one rank each, by their number."""
    ddp_s: dict[int, float]
    """The best step time of DDP, by number of workers."""
    notes: list[str]
    max_contraction: float
    seconds: float
    """How long planning took."""

    def speedup(self, prediction: Prediction) -> float:
        """Return the speed-up over all-reduce with as many workers of one rank each."""
        return self.baselines[prediction.ranks].step_s / prediction.step_s

    def objection(self, prediction: Prediction) -> str:
        """Return why a candidate is not recommended however fast it is; empty if it may be."""
        preferred = find(prediction.candidate.method).preferred_optimizer
        if prediction.contraction > self.max_contraction:
            return "hardly averages"
        if preferred and not self.job.optimizer.startswith(preferred):
            return f"needs {preferred}"
        if self.spec.memory_bytes and prediction.memory_bytes > self.spec.memory_bytes:
            return "does not fit in memory"
        return ""

    @cached_property
    def ranking(self) -> list[Prediction]:
        """The predictions, those that may be recommended first, each part by step time."""
        fastest = min(map(_seconds_per_gradient, self.predictions))

        def key(prediction: Prediction) -> tuple[bool, int, float, float]:
            # Equal times have the same class; within a class the contraction decides.
            time_class = math.floor(math.log(_seconds_per_gradient(prediction) / fastest) / math.log1p(SAME_TIME) + 0.5)
            mixing = round(prediction.contraction, 3) + prediction.late_steps
            return bool(self.objection(prediction)), time_class, mixing, prediction.bytes_per_step

        return sorted(self.predictions, key=key)

    @property
    def winner(self) -> Prediction:
        """The first of the ranking if it may be recommended and is fast enough, else all-reduce."""
        best = self.ranking[0]
        is_good = self.speedup(best) >= MIN_SPEEDUP and not self.objection(best)
        return best if is_good else self.baselines[best.ranks]

    @property
    def verdict(self) -> str:
        winner = self.winner
        baseline, ddp = self.baselines[winner.ranks], self.ddp_s[winner.ranks]
        if winner.replica is not None or winner.candidate.method != BASELINE:
            over = f" over {winner.candidate.topology}" if winner.candidate.uses_topology else ""
            if ddp > 0.98 * baseline.step_s:
                against_ddp = ""
            elif ddp / winner.step_s >= MIN_SPEEDUP:
                against_ddp = f", {ddp / winner.step_s:.2f}× DDP with ideal overlap"
            else:
                against_ddp = f"; DDP with ideal overlap takes {milliseconds(ddp)}: if you use it, stay with it"
            label = f"{winner.candidate.label}{over}"
            if winner.replica is not None:
                label = f"{winner.replica.inside.upper()} inside replicas of {winner.replica_size}, {label} between"
                against_ddp += self._against_flat(winner)
            return (
                f"Take {label}: {milliseconds(winner.step_s)} per step, "
                f"{self.speedup(winner):.2f}× all-reduce ({milliseconds(baseline.step_s)}, "
                f"bound by {baseline.bound_by}){against_ddp}."
            )
        stay = f"Stay on all-reduce: {milliseconds(baseline.step_s)} per step"
        others = [each for each in self.ranking if not self.objection(each) and each.candidate.method != BASELINE]
        if not others:
            return f"{stay}, and nothing else averages well enough."
        best, step_s = others[0].candidate.label, milliseconds(others[0].step_s)
        return f"{stay}, bound by {baseline.bound_by}; the best of the others, {best}, would take {step_s}."

    def _against_flat(self, winner: Prediction) -> str:
        """Return how a plan with replicas compares with the best one without, if that was predicted."""
        flat = [each for each in self.ranking if each.replica is None and not self.objection(each)]
        flat = [each for each in flat if each.ranks == winner.ranks and each.candidate.method != BASELINE]
        if not flat:
            return ""
        over = f" over {flat[0].candidate.topology}" if flat[0].candidate.uses_topology else ""
        faster = flat[0].step_s / winner.step_s
        named = f"without replicas ({flat[0].candidate.label}{over})"
        if faster >= 1 + SAME_TIME:
            return f", {faster:.2f}× the best {named}"
        closer = winner.contraction < flat[0].contraction
        contractions = f"contraction {winner.contraction:.3f} against {flat[0].contraction:.3f}"
        return f", as fast as the best {named}" + (f", and keeps models closer ({contractions})" if closer else "")

    @property
    def command(self) -> str:
        """The command that trains with the winner."""
        return self.command_of(self.winner)

    def command_of(self, winner: Prediction) -> str:
        """Return the command that trains with a candidate."""
        spec = self.spec.with_workers(winner.ranks)
        options: dict[str, Any] = {"task": self.job.task, **self.job.options, **winner.candidate.settings}
        if winner.replica is not None:
            if spec.nodes > 1:
                return _join_command(winner)
            options |= {"replica_size": winner.replica_size, "inside": winner.replica.inside}
        if not is_encodable(find(winner.candidate.method)):
            options.pop("wire", None)
        arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", _text(value))]
        if spec.nodes == 1:
            return shlex.join(["gossamer", "train", *arguments, "--workers", str(winner.workers)])
        torchrun = ["torchrun", "--nnodes", str(spec.nodes), "--nproc-per-node", str(spec.per_node)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
        if uses_nodes(winner.candidate.topology):
            arguments += ["--nodes", str(spec.nodes)]
        return shlex.join([*torchrun, "-m", "gossamer", "train", *arguments])

    def document(self) -> dict[str, Any]:
        return {
            "task": self.job.task,
            "parameters": self.job.parameters,
            "ranking": [self._row(prediction) for prediction in self.ranking],
            "ddp_step_s": {str(workers): seconds for workers, seconds in self.ddp_s.items()},
            "verdict": self.verdict,
            "command": self.command,
            "notes": self.notes,
            "seconds": self.seconds,
        }

    def _row(self, prediction: Prediction) -> dict[str, Any]:
        candidate = prediction.candidate
        return {
            "method": candidate.name,
            "topology": candidate.topology,
            "period": candidate.period,
            "options": dict(candidate.options),
            "workers": prediction.workers,
            "replica_size": prediction.replica_size,
            "inside": None if prediction.replica is None else prediction.replica.inside,
            "step_s": prediction.step_s,
            "interval_s": list(prediction.interval_s),
            "speedup": self.speedup(prediction),
            "bound_by": prediction.bound_by,
            "bytes_per_step": prediction.bytes_per_step,
            "memory_bytes": prediction.memory_bytes,
            "contraction": prediction.contraction,
            "late_steps": prediction.late_steps,
            "not_recommended": self.objection(prediction) or None,
        }


def make_plan(
    spec: ClusterSpec,
    job: Workload,
    *,
    workers: Sequence[int] = (),
    methods: Sequence[str] = (),
    topologies: Sequence[str] = (),
    only: Sequence[Candidate] = (),
    replicas: Sequence[tuple[int, str]] = ((1, ""),),
    max_contraction: float = MAX_CONTRACTION,
    seed: int = 0,
) -> Plan:
    """Predict every candidate.

    Args:
        workers: numbers of workers to compare; empty: as many as the cluster has.
        methods, topologies: names, or files; empty: all built-in ones.
        only: these candidates instead of all candidates of the methods and topologies.
        replicas: sizes of replicas, and what is inside of them; size 1: workers of one rank each.
        max_contraction: do not recommend candidates with a larger one.
    """
    began = time.perf_counter()
    predictions: list[Prediction] = []
    baselines: dict[int, Prediction] = {}
    ddp: dict[int, float] = {}
    notes: dict[str, None] = {}
    flat = spec.with_replicas(1, "")
    for count in workers or (flat.workers,):
        resized = flat.with_workers(count)
        num_runs = NUM_RUNS if count < MANY_WORKERS else NUM_RUNS_MANY_WORKERS
        runs = 1 if _is_deterministic(resized) else num_runs
        model = ClusterModel(resized, job.parameters, seed=seed, num_runs=runs, wire=job.wire)
        baselines[count] = predict(model, Candidate(BASELINE, "complete", {}))
        ddp[count] = ddp_step_s(model)
        for size, inside in replicas:
            if size > 1:
                shape = spec.with_replicas(size, inside).replica
                grouped = dataclasses.replace(resized.with_replicas(size, inside), replica=shape)
                model = ClusterModel(grouped, job.parameters, seed=seed, num_runs=runs)
            for candidate in only or candidates(model.workers, resized.nodes, methods, topologies):
                if size == 1 and candidate.method == BASELINE:
                    predictions.append(baselines[count])
                elif _is_possible(candidate, model):
                    predictions.append(predict(model, candidate))
            notes |= model.comm.notes
        if spec.measured and count > flat.workers:
            notes[f"{count} workers: measured with {flat.workers}; new ones are taken to be like them"] = None
    return Plan(
        spec=spec,
        job=job,
        predictions=predictions,
        baselines=baselines,
        ddp_s=ddp,
        notes=[f"extrapolates: {note}" for note in notes],
        max_contraction=max_contraction,
        seconds=time.perf_counter() - began,
    )


def _is_possible(candidate: Candidate, model: ClusterModel) -> bool:
    """Return whether a candidate runs between replicas as its settings say, where the workers are replicas."""
    replica, method = model.spec.replica, find(candidate.method)
    if method is Divisible:
        return replica is None or replica.inside != "fsdp"
    return method not in (Gossip, A2CiD2) or candidate.options.get("rate", 0.0) <= model.max_rate


def _is_deterministic(spec: ClusterSpec) -> bool:
    compute = spec.compute
    return not (compute.spread or compute.sample_s or any(table.spread for table in spec.tables))


def _seconds_per_gradient(prediction: Prediction) -> float:
    """Return what to compare plans for different numbers of workers by."""
    return prediction.step_s / prediction.ranks


def milliseconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _join_command(winner: Prediction) -> str:
    """Return how a plan with replicas on several nodes is started: each replica is a job of its own."""
    settings = ", ".join(f"{name}={value!r}" for name, value in winner.candidate.settings.items())
    between = f'gossamer.Replica(int(os.environ["REPLICA"]), {winner.workers}, "HOST:29400")'
    # Without the variable, ranks that torchrun starts again look for those that died.
    return (
        f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 REPLICA=0 torchrun --standalone --max-restarts {MAX_RESTARTS} "
        f"--nproc-per-node {winner.replica_size} train.py   # to REPLICA={winner.workers - 1}, with "
        f"gossamer.join(model, optimizer, mesh=mesh, between={between}, {settings})"
    )


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
