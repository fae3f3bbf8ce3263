"""One collective of the world of any order: who has arrived with what, and what everybody gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Gather, Mean, Shift, Shifted, Swap
from gossamer.testing.violations import Broken

Communication = Mean | Gather | Shift | Swap


class Contribution:
    """What one worker sends, with a copy of it."""

    def __init__(self, effect: Any, give: Callable[[Any], None]) -> None:
        self.effect, self.give = effect, give
        self.copies = [tensor.clone() for tensor in sent_by(effect)]

    def check_unchanged(self, rank: int) -> None:
        """Raise ``Broken`` if the worker has changed what it sent."""
        for tensor, copy in zip(sent_by(self.effect), self.copies, strict=True):
            if not same(tensor, copy):
                raise Broken(
                    "in_flight",
                    f"worker {rank} changed the vector of {describe_call(self.effect)} before the answer had arrived: "
                    "send worker.snapshot(), or a copy",
                )


class Collective:
    """One round of one topic."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.arrived: dict[int, Contribution] = {}
        self.answered: set[int] = set()

    def add(self, rank: int, contribution: Contribution) -> None:
        call = describe_call(contribution.effect)
        if rank not in self.members:
            raise Broken("collectives", f"worker {rank} takes part in {call}, but it is not a member of that group")
        if list(self.members) != sorted(set(self.members)):
            raise Broken("collectives", f"worker {rank} takes part in {call}: expected the group in ascending order")
        for other, theirs in self.arrived.items():
            if layout(contribution.effect) != layout(theirs.effect):
                raise Broken(
                    "collectives",
                    f"in {call} worker {rank} sends {layout(contribution.effect)} and worker {other} "
                    f"{layout(theirs.effect)}: expected the same on all members",
                )
        self.arrived[rank] = contribution

    @property
    def complete(self) -> bool:
        return len(self.arrived) == len(self.members)

    def new_answers(self) -> Iterator[tuple[int, Contribution, Any]]:
        """Yield each member that can be answered from now on, with its contribution and its answer."""
        kind = type(next(iter(self.arrived.values())).effect)
        answer = {Mean: self._mean, Gather: self._gather, Shift: self._shift}[kind]
        for rank, contribution in sorted(self.arrived.items()):
            if rank not in self.answered and (self.complete or (kind is Shift and self._shifts(contribution.effect))):
                self.answered.add(rank)
                yield rank, contribution, answer(rank)

    def _shifts(self, shift: Shift) -> bool:
        """Whether both peers of a worker have arrived: it does not wait for the others."""
        return shift.to in self.arrived and shift.source in self.arrived

    def _mean(self, rank: int) -> Any:
        parts = [self.arrived[member] for member in self.members]
        weights = torch.tensor([part.effect.weight for part in parts], dtype=torch.float64)
        total = float(weights.sum())

        def average(rows: Tensor) -> Tensor:
            if len(set(weights.tolist())) == 1 and total:
                return rows.mean(0)
            return (weights[:, None] * rows).sum(0) / total if total else torch.zeros_like(rows[0])

        mean = average(torch.stack([part.copies[0] for part in parts]))
        if not parts[0].effect.scalars:
            return mean
        scalars = average(torch.tensor([part.effect.scalars for part in parts], dtype=torch.float64))
        return mean, tuple(scalars.tolist())

    def _gather(self, rank: int) -> list[tuple[Tensor, ...]]:
        return [tuple(tensor.clone() for tensor in self.arrived[member].copies) for member in self.members]

    def _shift(self, rank: int) -> Shifted:
        source = self.arrived[rank].effect.source
        if source not in self.members or self.arrived[source].effect.to != rank:
            to = self.arrived[source].effect.to if source in self.members else None
            raise Broken(
                "collectives",
                f"in {describe_call(self.arrived[rank].effect)} worker {rank} expects the vector of worker {source}, "
                f"which sends to {to}: expected source to be the inverse of to",
            )
        sent = self.arrived[source]
        return Shifted(sent.copies[0].clone(), sent.effect.scalars, True)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the bit; numbers that are not finite are equal to themselves."""
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def sent_by(effect: Communication) -> tuple[Tensor, ...]:
    return effect.tensors if isinstance(effect, Gather) else (effect.vector,)


def layout(effect: Communication) -> str:
    """Return what must be equal on all members: lengths, dtypes and number of scalars."""
    tensors = [f"{tensor.numel()} × {str(tensor.dtype).removeprefix('torch.')}" for tensor in sent_by(effect)]
    scalars = len(getattr(effect, "scalars", ()))
    return ", ".join([*tensors, *([f"{scalars} scalars"] if scalars else [])])


def describe_call(effect: Communication) -> str:
    """Return what identifies a communication, for people."""
    if isinstance(effect, Swap):
        return f"Swap with worker {effect.peer}"
    group = getattr(effect, "group", None)
    members = "" if group is None else f" of workers {', '.join(map(str, group))}"
    return f"{type(effect).__name__} {effect.topic!r}, round {effect.round}{members}"
