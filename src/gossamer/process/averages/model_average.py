"""The average of all workers' models: weights and buffers, each worker by how much it contributed lately."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.process.averages.step_history import Contributions, contributions
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.groups import Groups
from gossamer.process.collectives.membership import FOREGROUND, Membership
from gossamer.process.pairwise.screening import absurd
from gossamer.process.runtime.flat_model import FlatModel
from gossamer.process.runtime.worker_state import WorkerState, is_finite

EXCLUDED, COUNTS, HAS_AVERAGE = 0, 1, 2
"""Standings: weights that are not finite or not of this run; weights that count; the average itself."""


@dataclass
class ModelCopy:
    """What is averaged of a model, in host memory."""

    x: Tensor
    buffers: Tensor
    """The floating-point buffers."""
    exact_buffers: Tensor
    """The other buffers, byte by byte."""

    @classmethod
    def of(cls, flat_model: FlatModel) -> ModelCopy:
        vectors = (flat_model.x, flat_model.buffer_vector(), flat_model.exact_buffer_vector())
        return cls(*(vector.to("cpu", copy=True) for vector in vectors))

    def load_buffers(self, flat_model: FlatModel) -> None:
        flat_model.load_buffers(self.buffers)
        flat_model.load_exact_buffers(self.exact_buffers)

    def is_finite(self, flat_model: FlatModel) -> bool:
        """Return whether all values are finite, apart from those of buffers that were not at the start either."""
        return is_finite(self.x) and is_finite(flat_model.without_start_values(self.buffers))


def average_models(
    groups: Groups, of: Membership, topic: str, own: ModelCopy, state: WorkerState, standing: int
) -> ModelCopy:
    """Return the average over the members of ``of``. Only those with the best standing count.

    Raises StepRetry if the membership has to change.
    """
    shares = gather_shares(groups, of, f"{topic} standings", own.x, state, standing)
    if state.replica is not None:
        return state.replica.whole(of, lambda: _average(groups, of, topic, own, shares))
    return _average(groups, of, topic, own, shares)


def _average(groups: Groups, of: Membership, topic: str, own: ModelCopy, shares: Contributions) -> ModelCopy:
    index = of.members.index(groups.rank)
    exact = float(shares.most_advanced == index)
    parts = ((own.x, shares.weights[index]), (own.buffers, shares.buffers[index]), (own.exact_buffers, exact))
    means = []
    for at, (vector, weight) in enumerate(parts):
        if len(vector):
            part = vector if weight else torch.zeros_like(vector)
            vector = groups.mean(of, FOREGROUND, part, Call("Mean", topic, at), weight=weight).mean
        means.append(vector)
    return ModelCopy(*means)


def gather_shares(
    groups: Groups, of: Membership, topic: str, x: Tensor, state: WorkerState, standing: int
) -> Contributions:
    """Return how much each member of ``of`` counts."""

    def gather(row: Tensor, round: int) -> list[Tensor]:
        return [gathered for (gathered,) in groups.gather(of, FOREGROUND, (row,), Call("Gather", topic, round))]

    def gather_rows() -> list[Tensor]:
        # Nobody has the others' parts before all have sent theirs: from then on all mean the same by "now".
        gather(torch.zeros(1), 0)
        about = torch.tensor([standing, norm], dtype=torch.float64)
        return gather(torch.cat([about, state.history.row(time.monotonic(), state.worker.step)]), 1)

    norm = float(torch.linalg.vector_norm(x))
    if state.replica is None:
        return model_shares(gather_rows(), state.method.lockstep)
    # The whole replica counts, or none of it, and as much on all its ranks.
    standing, norm = state.replica.lowest(standing), state.replica.total(norm**2) ** 0.5
    rows = state.replica.leaders(torch.stack(state.replica.whole(of, gather_rows)))
    return model_shares(list(rows), state.method.lockstep)


def model_shares(rows: list[Tensor], lockstep: bool) -> Contributions:
    """Return how much each member counts. A row: its standing, the norm of its weights, its history."""
    standings, norms = ([float(row[column]) for row in rows] for column in (0, 1))
    best = [index for index, standing in enumerate(standings) if standing == max(standings)]
    typical_norm = float(torch.tensor([norms[index] for index in best]).median())
    # Where nobody counts, or nobody is sane, everybody does.
    chosen = [index for index in best if not absurd(norms[index], typical_norm)] or list(range(len(rows)))
    if max(standings) == HAS_AVERAGE:
        among = Contributions([1.0] * len(chosen), [1.0] * len(chosen), 0)
    else:
        among = contributions([rows[index][2:] for index in chosen], lockstep)
    weights, buffers = [0.0] * len(rows), [0.0] * len(rows)
    for position, index in enumerate(chosen):
        weights[index], buffers[index] = among.weights[position], among.buffers[position]
    return Contributions(weights, buffers, chosen[among.most_advanced])
