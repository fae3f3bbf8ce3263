"""``method = auto``: probe briefly, plan, and take the winner."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import InputError
from gossamer.plan.machines import Machines
from gossamer.plan.predict import Candidate, graph
from gossamer.plan.probe.prober import Steps, probe
from gossamer.plan.probe.session import LostWorker, ProbeSession
from gossamer.plan.recommend import Workload, make_plan
from gossamer.process.store.rank_info import RankInfo
from gossamer.topology import names

AUTO = "auto"
SECONDS = 10.0
MADE_FOR_NODES = "alternating-exponential-ring"


@dataclass(frozen=True)
class Choice:
    """What was chosen, and why."""

    candidate: Candidate
    verdict: str
    machines: Machines


def choose(
    rank_info: RankInfo, steps: Steps, keep_pace: Callable[[float], None], optimizer: str, knows_nodes: bool
) -> Choice:
    """Measure with all workers, plan, and return the winner: the same on all of them.

    ``knows_nodes``: whether the training that follows can be told how many machines there are.
    """
    session = ProbeSession(replace(rank_info, prefix=f"{rank_info.prefix}auto/"))
    try:
        findings = probe(session, steps, keep_pace, SECONDS, lambda what: None)
        if findings.lost:
            raise LostWorker(findings.lost)
        machines = findings.machines()
        fitting = [name for name in names() if _fits(name, machines, knows_nodes)]
        plan = make_plan(machines, Workload(AUTO, findings.parameters, optimizer), topologies=fitting)
        session.tell("done", True)
    finally:
        session.close()
    return Choice(plan.winner.candidate, plan.verdict, machines)


def _fits(topology: str, machines: Machines, knows_nodes: bool) -> bool:
    if topology == MADE_FOR_NODES and machines.per_node > 1 and not knows_nodes:
        return False
    try:
        graph(topology, machines.workers, machines.nodes)
    except InputError:
        return False
    return True


class LossSteps:
    """A user's model and optimizer with a loss to differentiate; what measuring changed is put back by ``restore``."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self._state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        self._rng = torch.get_rng_state()
        self._cuda = any(parameter.is_cuda for parameter in model.parameters())

    def gradient(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()

    def update(self, number: int) -> None:
        self.optimizer.step()

    def settle(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def restore(self) -> None:
        """The model, the optimizer and the random numbers as they were."""
        model_state, optimizer_state = self._state
        self.model.load_state_dict(model_state)
        self.optimizer.load_state_dict(optimizer_state)
        self.optimizer.zero_grad()
        torch.set_rng_state(self._rng)


def choose_for_loop(
    rank_info: RankInfo, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]
) -> tuple[Choice, dict[str, Any]]:
    """The winner for a user's own loop, and the settings of ``gossamer.join`` for it."""
    steps = LossSteps(model, optimizer, loss)
    try:
        choice = choose(rank_info, steps, lambda began: None, type(optimizer).__name__.lower(), knows_nodes=False)
    finally:
        steps.restore()
    settings: dict[str, Any] = {"method": choice.candidate.method, **choice.candidate.options}
    if choice.candidate.over_a_graph:
        settings["topology"] = choice.candidate.topology
    return choice, settings
