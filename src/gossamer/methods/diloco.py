"""DiLoCo and Streaming DiLoCo: local steps, and an outer optimizer that steps on the workers' average progress.

Every worker keeps an anchor ``a``, equal on all workers. It takes inner steps with its own optimizer. After every H-th
the outer optimizer, SGD with Nesterov momentum, steps from the anchor, and training goes on from there:

    every step:      Update(x_i)
    every H-th:      Δ = a − mean_i x_i ;  v = μ v + Δ ;  a −= η (Δ + μ v) ;  x_i = a

    a, v             vector("anchor"), vector("outer_momentum"), equal on all workers to the bit
    H, η, μ          period, outer_lr, outer_momentum

The state of the inner optimizer stays local. With η = 1 and μ = 0 it is local SGD.

Streaming: the parameters are cut into F ``fragments`` at the boundaries of tensors. Fragment f is due every H steps,
f·H/F steps after the first one, so that F times fewer bytes travel at once. With a ``delay`` τ nobody waits while the
average is in flight: it is started at step t and applied by all workers at exactly t + τ, after that step's Update.
The anchor and v of the fragment change as above, and x_i has moved on meanwhile:

    merge = displacement:    x_i += a − s_i                    s_i: what the worker sent; no inner step is lost
    merge = mix:             x_i = α x_i + (1 − α) a           as published; α = alpha, ½ with a delay and 0 without

What travels: one all-reduce of the parameters every ``period`` steps, ``2(n−1)/n · 4P / H`` bytes sent per worker and
step in float32, as in local SGD; ``2(n−1)/n · 4P / F`` at once. Extra memory: the anchor, v, the mean of a fragment,
and with a delay a copy of the parameters.

Defaults: the published η = 0.7 goes with μ = 0.9, which adds up ten outer steps: a run of a dozen ends behind local
SGD. With μ = 0.5 every run that we measured, of 12 to 480 outer steps, ended ahead of it; most with 0.9 did not. The
published mix keeps half of the distance between the workers at every merge, and loses to a displacement in short runs
and where workers have different data.

References: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, and "Streaming
DiLoCo with overlapping communication", 2025. Deviations: fragments are contiguous, not every F-th layer;
displacements are ours; a fragment in flight when the membership changes is skipped, and is due again H steps later.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gossamer.effects import Mean, MethodGenerator, Start, Update, Wait, yields
from gossamer.errors import InputError
from gossamer.methods.method import Method, MethodConfig
from gossamer.settings import option
from gossamer.topology import Topology
from gossamer.vectors.vector_math import combine
from gossamer.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DiLoCoConfig(MethodConfig):
    period: int = option(10, "local steps between two averagings of a fragment (H)", minimum=1)
    outer_lr: float = option(0.7, "learning rate of the outer optimizer", above=0)
    outer_momentum: float = option(0.5, "Nesterov momentum of the outer optimizer", minimum=0, maximum=1)
    fragments: int = option(1, "parts of the model that are averaged at different steps", minimum=1)
    delay: int = option(0, "steps after which the average of a fragment is applied", minimum=0)
    merge: str = option("displacement", "how an average is applied after its delay", choices=("displacement", "mix"))
    alpha: float = option(-1.0, "share of the local model that mix keeps; -1: 0.5 with a delay, else 0", maximum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay > self.period:
            raise InputError(f"--delay is {self.delay}: expected at most --period, which is {self.period}")
        if self.alpha < 0 and self.alpha != -1:
            raise InputError(f"--alpha is {self.alpha}: expected a share from 0 to 1, or -1 for the default")


class DiLoCo(Method):
    """Local steps, and an outer Nesterov step on their average."""

    name = "diloco"
    summary = "local steps, every few an outer Nesterov step on their average; in fragments (Douillard et al. 2023)"
    Config: ClassVar[type[MethodConfig]] = DiLoCoConfig
    shared: ClassVar[tuple[str, ...]] = ("anchor", "outer_momentum", "outer_steps")
    uses_topology = False
    gives_up = ("mean", "alone")
    planned_options = ({"period": 10}, {"period": 50}, {"period": 50, "delay": 5})

    def __init__(self, config: DiLoCoConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.config: DiLoCoConfig = config
        self.alpha = config.alpha if config.alpha >= 0 else 0.5 if config.delay else 0.0
        # The averages in flight are the same for all workers, too.
        self.shared = (*type(self).shared, *map(ticket_name, range(config.fragments)))  # type: ignore[misc]

    def begin(self, worker: Worker) -> None:
        if self.config.fragments > 1:
            cut(worker.offsets, self.config.fragments)  # raises if there are too many
        # A worker that joins has taken over the others' anchor and their number of outer steps.
        if "outer_steps" not in worker.scalars:
            worker.vector("anchor").copy_(worker.x)
            worker.scalars["outer_steps"] = 0
        if self.config.delay:
            worker.vector("sent").copy_(worker.x)

    @yields(Update, Mean, Start, Wait)
    def step(self, worker: Worker) -> MethodGenerator:
        yield Update()
        delay = self.config.delay
        for fragment in range(self.config.fragments):
            if delay and self.is_due(fragment, worker.step + 1 - delay):
                yield from self.merge(worker, fragment)
            if self.is_due(fragment, worker.step + 1):
                name, x = ticket_name(fragment), self.part(worker, fragment, worker.x)
                if delay:
                    # The worker trains on while it is in flight.
                    sent = self.part(worker, fragment, worker.vector("sent")).copy_(x)
                    worker.tickets[name] = yield Start(Mean(sent, round=worker.step, topic=name, same=True))
                else:
                    mean = yield Mean(x, round=worker.step, topic=name, same=True)
                    self.outer_step(worker, fragment, mean)

    def steps_until_shared(self, step: int) -> int:
        period = self.config.period
        return (-step % period if self.config.fragments == 1 else period) + self.config.delay

    def is_due(self, fragment: int, steps: int) -> bool:
        """Return whether the average of a fragment starts after this number of steps."""
        period = self.config.period
        return steps > 0 and steps % period == fragment * period // self.config.fragments

    def merge(self, worker: Worker, fragment: int) -> MethodGenerator:
        """Wait for the average of a fragment, if it is in flight, and take the outer step with it."""
        ticket = worker.tickets.get(ticket_name(fragment))
        if ticket is not None:
            mean = yield Wait(ticket)
            # Only now: if the step is abandoned while it waits, ``finish`` still finds the ticket.
            worker.tickets.pop(ticket_name(fragment), None)
            self.outer_step(worker, fragment, mean)

    def outer_step(self, worker: Worker, fragment: int, mean: Tensor) -> None:
        """Take the outer step of a fragment with its average, and move the worker's model."""
        worker.scalars["outer_steps"] += 1
        lr, momentum = self.config.outer_lr, self.config.outer_momentum
        a, v, x = (
            self.part(worker, fragment, vector)
            for vector in (worker.vector("anchor"), worker.vector("outer_momentum"), worker.x)
        )
        # a − η (Δ + μ v) without Δ, so that all is done in one pass over memory.
        combine(
            (v, momentum, ((1.0, a), (-1.0, mean))),
            (a, 1.0 - lr, ((lr, mean), (-lr * momentum, v))),
        )
        if self.config.delay and self.config.merge == "displacement":
            moved = self.part(worker, fragment, worker.vector("sent"))
            combine((moved, -1.0, ((1.0, a),)), (x, 1.0, ((1.0, moved),)))
        else:
            combine((x, self.alpha, ((1.0 - self.alpha, a),)))

    def part(self, worker: Worker, fragment: int, vector: Tensor) -> Tensor:
        """Return the part of ``vector`` that belongs to a fragment, as a view."""
        if self.config.fragments == 1:
            return vector
        bounds = cut(worker.offsets, self.config.fragments)
        return vector[bounds[fragment] : bounds[fragment + 1]]

    @yields(Wait)
    def finish(self, worker: Worker) -> MethodGenerator:
        for fragment in range(self.config.fragments):
            yield from self.merge(worker, fragment)


def ticket_name(fragment: int) -> str:
    return f"fragment {fragment}"


def cut(offsets: Sequence[int], fragments: int) -> list[int]:
    """Return the ``fragments + 1`` bounds of fragments of about equal length that begin where tensors begin."""
    tensors = len(offsets) - 1
    if fragments > tensors:
        raise InputError(
            f"--fragments is {fragments}: expected at most one per tensor of the model, which has {tensors}"
        )
    bounds = [0]
    for number in range(1, fragments):
        goal = number * offsets[-1] / fragments
        at = bisect.bisect_left(offsets, goal)
        if at and goal - offsets[at - 1] < offsets[at] - goal:
            at -= 1
        # Every fragment has at least one tensor.
        at = min(max(at, bounds[-1] + 1), tensors - (fragments - number))
        bounds.append(at)
    return [offsets[at] for at in (*bounds, tensors)]
