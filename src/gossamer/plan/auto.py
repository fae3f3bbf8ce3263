"""``method = auto``: probe the cluster briefly, plan, and use the winner."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gossamer.config import AUTO
from gossamer.errors import InputError
from gossamer.plan.cluster_spec import ClusterSpec
from gossamer.plan.predict import Candidate
from gossamer.plan.probe.prober import TrainingSteps, probe
from gossamer.plan.probe.session import ProbeSession, WorkerLost, keep_store_alive
from gossamer.plan.recommend import Workload, make_plan
from gossamer.process.joining.handshake import shaken_hands
from gossamer.process.joining.join_facts import find_facts_of_auto
from gossamer.process.store.rank_info import RankInfo
from gossamer.topology import fits, names, uses_nodes

PROBE_S = 10.0


@dataclass(frozen=True)
class Choice:
    """The winner, the reason, and the cluster as it was measured."""

    candidate: Candidate
    verdict: str
    spec: ClusterSpec


def choose(
    rank_info: RankInfo,
    steps: TrainingSteps,
    delay_gradient: Callable[[float], None],
    optimizer: str,
    knows_nodes: bool,
) -> Choice:
    """Probe with all workers, plan, and return the winner, the same on every worker.

    Args:
        delay_gradient: called after a gradient with its start time; waits until it has taken as long as it should.
        optimizer: its name.
        knows_nodes: whether training has an option for the number of nodes; without, topologies that depend on it are
            left out if nodes have several workers.
    """
    session = ProbeSession(replace(rank_info, prefix=f"{rank_info.prefix}auto/"))
    try:
        findings = probe(session, steps, delay_gradient, PROBE_S, lambda what: None)
        if findings.lost:
            raise WorkerLost(findings.lost)
        spec = findings.cluster_spec()
        topologies = [
            name
            for name in names()
            if fits(name, spec.workers, spec.nodes) and (knows_nodes or spec.per_node == 1 or not uses_nodes(name))
        ]
        plan = make_plan(spec, Workload(AUTO, findings.parameters, optimizer), topologies=topologies)
        session.share("done", True)
    finally:
        session.close()
    return Choice(plan.winner.candidate, plan.verdict, spec)


class LossSteps:
    """Steps of a user's model and optimizer; ``restore`` undoes what they changed."""

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

    def synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def restore(self) -> None:
        model_state, optimizer_state = self._state
        self.model.load_state_dict(model_state)
        self.optimizer.load_state_dict(optimizer_state)
        self.optimizer.zero_grad()
        torch.set_rng_state(self._rng)


def choose_for_loop(
    rank_info: RankInfo,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    timeout_s: float,
) -> tuple[Candidate, str]:
    """Return what to train with, the same on every worker, and the reason. A worker that comes back gets it too.

    InputError if workers differ, do not come within ``timeout_s``, or die meanwhile.
    """
    keep_store_alive(rank_info)
    facts = find_facts_of_auto(model, optimizer, rank_info.workers)
    with shaken_hands(rank_info, facts, timeout_s) as (store, begun):
        if begun:
            return _parse_choice(store.get("auto/choice"))
        steps = LossSteps(model, optimizer, loss)
        try:
            choice = choose(rank_info, steps, lambda began: None, type(optimizer).__name__.lower(), knows_nodes=False)
        except WorkerLost as lost:
            raise InputError(
                f"{lost} was lost while auto measured: start all workers again, or name a method"
            ) from None
        finally:
            steps.restore()
        chosen = choice.candidate
        published = {"method": chosen.method, "topology": chosen.topology, "options": dict(chosen.options)}
        store.set("auto/choice", json.dumps({**published, "verdict": choice.verdict}))
    return chosen, choice.verdict


def _parse_choice(text: bytes | None) -> tuple[Candidate, str]:
    """Return what the others have chosen, as they published it."""
    try:
        found = json.loads(text or b"")
        method, topology, options, verdict = (found[name] for name in ("method", "topology", "options", "verdict"))
    except (ValueError, KeyError, TypeError):
        method = options = None
    if not (isinstance(method, str) and isinstance(options, dict)):
        raise InputError(
            "the other workers measure for auto without this one: start all workers again, or name a method"
        )
    return Candidate(method, str(topology), options), str(verdict)
