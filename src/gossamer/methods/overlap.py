"""Overlapped decentralized training: the averaging of each round is hidden behind the next gradient:

    x_i(t+1) = Σ_j w_ij x_j(t) + u_i(t)        u_i: the optimizer's update, from the gradient at x_i(t)

A worker waits for the averaging that it started in the last step and adds ``mean − x`` to ``x``. Then it does the
Update, on the mixed parameters, so that weight decay acts on them. Then it starts the averaging of the new ``x`` for
the next step. Nothing changes ``x`` while its averaging is in flight, so no snapshot is needed. The topology's schedule
gives the groups of each round: every worker is in one group per round and moves to its mean (with Base graphs only part
of the way, ``strength``). Only parameters travel; the optimizer state stays local. AccumAdam and AccumAdamW
(``gossamer.optim``) make its moments less noisy with small batches.

With ``global_every = K`` every K-th averaging is an exact mean over all workers instead of the round's group.

What travels: the parameters once per step, ``2(m−1)/m · 4P`` bytes sent per worker in float32 in a group of m; in pairs
``4P``. Extra memory: one buffer for the mean.

Reference: Wang, Zhang, Wu, Johansson, "From promise to practice: realizing high-performance decentralized training",
ICLR 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gossamer.effects import Mean, MethodGenerator, Start, Update, Wait, yields
from gossamer.methods.method import Method, MethodConfig
from gossamer.methods.quasi_global import AveragingConfig
from gossamer.settings import option
from gossamer.topology import Topology
from gossamer.topology.disagreement import Disagreement, InRounds
from gossamer.worker import Worker


@dataclass(frozen=True, kw_only=True)
class OverlapConfig(AveragingConfig):
    global_every: int = option(0, "steps between two exact averages over all workers; 0: never", minimum=0)


class Overlap(Method):
    """Synchronous rounds over a schedule of groups, hidden behind the gradients."""

    name = "overlap"
    summary = "rounds of group averages hidden behind the next gradient, any optimizer (Wang et al. 2025)"
    Config: ClassVar[type[MethodConfig]] = OverlapConfig
    keeps_gradient = True

    def __init__(self, config: OverlapConfig, topology: Topology) -> None:
        super().__init__(config, topology)
        self.global_every = config.global_every

    @yields(Update, Mean, Start, Wait)
    def step(self, worker: Worker) -> MethodGenerator:
        yield from self.merge(worker)
        yield Update()
        round = worker.step
        if self.global_every and (round + 1) % self.global_every == 0:
            members, strength = None, 1.0
        else:
            group = worker.topology.group(round, worker.rank)
            members, strength = group.members, group.strength
        worker.scalars["strength"] = strength
        worker.tickets["mix"] = yield Start(Mean(worker.x, round=round, topic="model", group=members))

    def steps_until_shared(self, step: int) -> int:
        # The averaging in flight has to arrive.
        return 1

    def disagreement(self) -> Disagreement:
        return InRounds(self.topology)

    def merge(self, worker: Worker) -> MethodGenerator:
        """Wait for the averaging in flight, if there is one, and move to its mean."""
        ticket = worker.tickets.get("mix")
        if ticket is not None:
            mean = yield Wait(ticket)
            # Only now: if the step is abandoned while it waits, ``finish`` still finds the ticket.
            worker.tickets.pop("mix", None)
            worker.x.lerp_(mean, worker.scalars["strength"])

    @yields(Wait)
    def finish(self, worker: Worker) -> MethodGenerator:
        yield from self.merge(worker)
