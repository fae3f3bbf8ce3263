"""A plan for quality: the time to a target, not only the time of a step.

The promising candidates of a plan train in the virtual cluster, with the times of the planned cluster and real
gradients. That tells how many steps each needs to the target: its statistical price. Times the predicted step, that is
its time to the target. A budget of real seconds limits how long they train. A candidate that cannot win any more stops.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gossamer.config import Run, resolve
from gossamer.methods import find
from gossamer.methods.loading.method_contract import is_encodable
from gossamer.plan.cluster_spec import ClusterSpec
from gossamer.plan.learning_curve import Reached, when_reached
from gossamer.plan.predict import Prediction
from gossamer.plan.recommend import BASELINE, MIN_SPEEDUP, Plan, milliseconds
from gossamer.plan.runtime_model.replay import MeasuredClock, hardware_config
from gossamer.plan.target import Target
from gossamer.report.formats import duration
from gossamer.results import Point, WorkerPoint
from gossamer.virtual.simulation import simulate

MAX_METHODS = 6
SLOWER_FACTOR = 1.25
"""Beside its fastest candidate, that of a method which averages best is tried, if it is at most this much slower."""

MAX_STEPS = 1_000_000
"""Nobody trains this long: the budget ends a trial first."""

HOPELESS_FACTOR = 1.5
"""A candidate that takes this many times the best time to the target so far stops."""

CLOSE_FACTOR = 1.15
"""Candidates whose time is within this factor of the best are repeated with other seeds while the budget lasts."""

MAX_SEEDS = 3

EVALUATION_SHARE = 0.25
"""What evaluations may cost beside the gradients; a gradient costs about three forward passes."""


class _Enough(Exception):
    """The trial may stop: the target is reached, out of reach or the time is up."""


@dataclass
class Trial:
    """One candidate, trained towards the target with one or more seeds."""

    prediction: Prediction
    target: Target
    curves: list[tuple[list[float], list[float]]] = field(default_factory=list)
    """Of each seed: steps per worker, and the error then."""
    diverged: bool = False
    wall_s: float = 0.0

    @property
    def reached(self) -> Reached | None:
        """The steps to the target: means over the seeds."""
        found = [when_reached(steps, errors, self.target.error) for steps, errors in self.curves]
        known = [each for each in found if each is not None]
        if self.diverged or not known or len(known) < len(found):
            return None
        return Reached(
            statistics.mean(each.steps for each in known),
            min(each.low for each in known),
            max(each.high for each in known),
            any(each.extrapolated for each in known),
        )

    @property
    def time_s(self) -> float:
        """Time to the target; infinite if it is not reached, as far as is known."""
        reached = self.reached
        return math.inf if reached is None else reached.steps * self.prediction.step_s

    def price(self, baseline: Trial) -> float | None:
        """Return how many times the steps of the baseline it needs."""
        ours, theirs = self.reached, baseline.reached
        return None if ours is None or theirs is None or not theirs.steps else ours.steps / theirs.steps

    def document(self, baseline: Trial) -> dict[str, Any]:
        reached, candidate = self.reached, self.prediction.candidate
        return {
            "method": candidate.name,
            "topology": candidate.topology,
            "options": dict(candidate.options),
            "step_s": self.prediction.step_s,
            "steps": None if reached is None else reached.steps,
            "steps_interval": None if reached is None else [reached.low, reached.high],
            "extrapolated": None if reached is None else reached.extrapolated,
            "price": self.price(baseline),
            "time_s": None if math.isinf(self.time_s) else self.time_s,
            "diverged": self.diverged,
            "seeds": len(self.curves),
            "wall_s": self.wall_s,
        }


@dataclass(frozen=True)
class QualityPlan:
    target: Target
    trials: list[Trial]
    """The fastest to the target first."""
    seconds: float

    @property
    def baseline(self) -> Trial:
        return next(trial for trial in self.trials if trial.prediction.candidate.method == BASELINE)

    @property
    def winner(self) -> Trial:
        """The fastest to the target, if it is clearly faster than all-reduce; else all-reduce."""
        best = self.trials[0]
        if math.isinf(best.time_s) or self.baseline.time_s / best.time_s < MIN_SPEEDUP:
            return self.baseline
        return best

    @property
    def verdict(self) -> str:
        winner, baseline = self.winner, self.baseline
        if math.isinf(winner.time_s):
            return (
                f"No candidate comes to {self.target} as far as can be said: give a larger --budget, "
                "or a target that is easier to reach."
            )
        candidate = winner.prediction.candidate
        over = f" over {candidate.topology}" if candidate.uses_topology else ""
        when = f"{self.target} after {_about(winner)}{duration(winner.time_s)}"
        steps = f"{winner.reached.steps:.0f} steps of {milliseconds(winner.prediction.step_s)}"  # type: ignore[union-attr]
        if candidate.method == BASELINE:
            others = [trial for trial in self.trials if trial is not winner and not math.isinf(trial.time_s)]
            best = (
                f"; the best of the others, {others[0].prediction.candidate.label}, takes {duration(others[0].time_s)}"
            )
            return f"Stay on all-reduce: {when} ({steps}){best if others else ''}."
        if math.isinf(baseline.time_s):
            return f"Take {candidate.label}{over}: {when} ({steps}); all-reduce does not come there within the budget."
        return (
            f"Take {candidate.label}{over}: {when} ({steps}), {baseline.time_s / winner.time_s:.2f}× all-reduce "
            f"({_about(baseline)}{duration(baseline.time_s)}, {baseline.reached.steps:.0f} steps of "  # type: ignore[union-attr]
            f"{milliseconds(baseline.prediction.step_s)})."
        )

    def document(self) -> dict[str, Any]:
        return {
            "until": {self.target.measure: self.target.value},
            "ranking": [trial.document(self.baseline) for trial in self.trials],
            "verdict": self.verdict,
            "seconds": self.seconds,
        }


def _about(trial: Trial) -> str:
    return "about " if trial.reached is not None and trial.reached.extrapolated else ""


def promising(plan: Plan) -> list[Prediction]:
    """Return all-reduce, and of the fastest methods that may be recommended the fastest and the best averaging."""
    by_method: dict[str, list[Prediction]] = {}
    for prediction in plan.ranking:
        if prediction.candidate.method != BASELINE and not plan.objection(prediction):
            by_method.setdefault(prediction.candidate.method, []).append(prediction)
    chosen = [next(iter(plan.baselines.values()))]
    for found in list(by_method.values())[:MAX_METHODS]:
        fastest = min(found, key=lambda each: each.step_s)
        fast = [each for each in found if each.step_s <= SLOWER_FACTOR * fastest.step_s]
        best = min(fast, key=lambda each: (each.contraction, each.step_s))
        chosen += [fastest] if best is fastest else [fastest, best]
    return sorted(chosen, key=lambda each: each.step_s)


def make_quality_plan(
    plan: Plan,
    settings: Mapping[str, Any],
    target: Target,
    budget_s: float,
    on_trial: Callable[[str], None] = lambda text: None,
) -> QualityPlan:
    """Train the promising candidates of ``plan`` towards the target for ``budget_s`` real seconds.

    Args:
        settings: options of ``gossamer simulate``: task, batch, learning rate and so on.
        on_trial: told what is trained next.
    """
    began = time.monotonic()
    until = began + budget_s
    trials = [Trial(prediction, target) for prediction in promising(plan)]
    # Wrong settings are reported before anything is trained.
    _run(plan.spec, trials[0].prediction, settings, 0)
    for index, trial in enumerate(trials):
        share_s = max(0.0, until - time.monotonic()) / (len(trials) - index)
        on_trial(f"{trial.prediction.candidate.label} over {trial.prediction.candidate.topology}")
        # All others are compared with all-reduce.
        best_s = math.inf if trial.prediction.candidate.method == BASELINE else _best(trials)
        _train(plan.spec, trial, settings, 0, share_s, best_s)
    for seed in range(1, MAX_SEEDS):
        best_s = _best(trials)
        close = [trial for trial in trials if trial.time_s <= CLOSE_FACTOR * best_s < math.inf]
        if len(close) < 2:
            break
        for index, trial in enumerate(close):
            share_s = (until - time.monotonic()) / (len(close) - index)
            # A curve that ends earlier than the others of the same candidate would say less than they do.
            if share_s > 1.2 * trial.wall_s / len(trial.curves):
                on_trial(f"{trial.prediction.candidate.label} again, seed {seed}")
                _train(plan.spec, trial, settings, seed, share_s, math.inf)
    trials.sort(key=lambda trial: (trial.time_s, trial.prediction.step_s))
    return QualityPlan(target, trials, time.monotonic() - began)


def _best(trials: Sequence[Trial]) -> float:
    return min((trial.time_s for trial in trials if trial.curves), default=math.inf)


def _train(
    spec: ClusterSpec, trial: Trial, settings: Mapping[str, Any], seed: int, share_s: float, best_s: float
) -> None:
    """Train a candidate until it reaches the target, is hopeless beside ``best_s`` or ``share_s`` real seconds end."""
    steps: list[float] = []
    errors: list[float] = []
    trial.curves.append((steps, errors))
    began = time.monotonic()

    def observe(point: Point, workers: Callable[[], list[WorkerPoint]], events: list[str]) -> None:
        error = trial.target.error_of(point)
        if error is not None and math.isfinite(error):
            per_worker = point.total_steps / spec.workers
            steps.append(per_worker)
            errors.append(error)
            is_hopeless = per_worker * trial.prediction.step_s > HOPELESS_FACTOR * best_s
            if error <= trial.target.error or is_hopeless:
                raise _Enough
        if time.monotonic() - began > share_s and len(steps) > 1:
            raise _Enough

    run = _run(spec, trial.prediction, settings, seed)
    make_clock = partial(MeasuredClock, spec, True) if spec.measured or spec.compute.sample_s else None
    with contextlib.suppress(_Enough):
        result = simulate(run, observe, make_clock=make_clock, evaluates_workers=False)
        if result.interrupted:
            # A simulation keeps what it has; here, Ctrl-C ends the whole plan.
            raise KeyboardInterrupt
        trial.diverged = trial.diverged or result.diverged is not None
    trial.wall_s += time.monotonic() - began


def _run(spec: ClusterSpec, prediction: Prediction, settings: Mapping[str, Any], seed: int) -> Run:
    candidate, hardware = prediction.candidate, hardware_config(spec)
    values = {**settings, **candidate.settings, "workers": spec.workers, "seed": seed, "steps": MAX_STEPS}
    if not is_encodable(find(candidate.method)):
        values.pop("wire", None)
    values |= {name: getattr(hardware, name) for name in ("compute", "straggler", "nodes", "link", "node_link")}
    (run,) = resolve(values)
    return replace(run, config=replace(run.config, eval_every=_eval_every(run)))


def _eval_every(run: Run) -> int:
    """Return how many steps there are between two evaluations that cost ``EVALUATION_SHARE`` of the training."""
    trained = 3 * run.config.worker_batch * run.config.workers
    return max(1, math.ceil(len(run.task.test[0]) / (EVALUATION_SHARE * trained)))
