"""Which steps are in a model: what tells a model that is behind from one that went on separately.

In lockstep all members of a view have the same model after each of its steps. So a model is named by its *head*, the
view of its last step and how many steps were made in that view, and its lineage says how many steps of which views are
in it. As in a version control system: a model whose head is in the lineage of another is behind it and loses nothing
by taking that one over. Two models neither of which is in the other were trained separately, and are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_VIEWS = 1024
"""Views that a lineage remembers. Older ones are forgotten, so that a message that carries a lineage stays below 64 KB.

A side of a partition that is away for more views than that has no view in common with the others any more. A worker
that dies and comes back makes two: with one that does so every 2.5 seconds these are twenty minutes.
"""


class ViewId(NamedTuple):
    """The name of a view. No two views have the same: a process uses a number only once."""

    number: int
    leader: int
    """The rank of the worker that proposed it."""
    process: int
    """Which process of that rank: a worker that is started again has a higher number."""


class Steps(NamedTuple):
    """The steps of one view that are in a model."""

    view: ViewId
    made: int
    workers: int
    """How many workers made each of them."""


class Lineage(NamedTuple):
    """The steps that are in a model."""

    step: int
    """The number of its last step, for schedules. After a merge the higher one of both sides."""
    head: ViewId
    """The view of its last step."""
    parts: tuple[Steps, ...]
    """Sorted by view; the head is among them."""

    @property
    def head_count(self) -> int:
        return self.steps_of(self.head)

    def steps_of(self, view: ViewId) -> int:
        """Return how many steps of ``view`` are in this model; −1 if none are known."""
        for part in self.parts:
            if part.view == view:
                return part.made
        return -1

    def includes(self, other: Lineage) -> bool:
        """Return whether all steps of ``other`` are in this model."""
        return self.steps_of(other.head) >= other.head_count

    def has_more_of(self, view: ViewId, other: Lineage) -> bool:
        """Return whether more steps of ``view`` are in this model than in the other."""
        return max(self.steps_of(view), 0) > max(other.steps_of(view), 0)

    def related(self, other: Lineage) -> bool:
        """Return whether both descend from one model. Models that began separately cannot be averaged."""
        views = {part.view for part in self.parts}
        return any(part.view in views for part in other.parts)

    def after_step(self, view: ViewId, workers: int) -> Lineage:
        """Return the lineage after one more step, made in ``view`` by that many workers."""
        last = self.parts[-1]
        if last.view == view:
            return Lineage(self.step + 1, view, (*self.parts[:-1], last._replace(made=last.made + 1)))
        return Lineage(self.step + 1, view, _sorted((*self.parts, Steps(view, 1, workers))))

    def steps_missing_in(self, others: Sequence[Lineage]) -> int:
        """Return how many steps are in this model and in none of others. Those of forgotten views are not known."""
        most = [max((other.steps_of(part.view) for other in others), default=0) for part in self.parts]
        return sum(max(0, part.made - max(0, there)) for part, there in zip(self.parts, most, strict=True))

    def work_missing_in(self, others: Iterable[Lineage]) -> int:
        """Return how many steps, counted for each worker that made them, are in this model and in none of others."""
        known = [{part.view: part.made for part in other.parts} for other in others]
        return sum(
            max(0, part.made - max((counts.get(part.view, 0) for counts in known), default=0)) * part.workers
            for part in self.parts
        )


ROOT = Lineage(0, ViewId(0, 0, 0), (Steps(ViewId(0, 0, 0), 0, 0),))
"""The model with which a run begins."""


class Head(NamedTuple):
    """A model that is in no other model, and who has it."""

    lineage: Lineage
    ranks: tuple[int, ...]
    weight: float
    """Its share in the merged model: by the work that is in no other head."""


def find_heads(models: dict[int, Lineage]) -> tuple[Head, ...]:
    """Return the models that are not behind another, the one with the most work first."""
    holders: dict[Lineage, list[int]] = {}
    for rank, lineage in sorted(models.items()):
        # Lineages may differ in what they have forgotten: the head is what counts.
        same = next((known for known in holders if known.includes(lineage) and lineage.includes(known)), lineage)
        holders.setdefault(same, []).append(rank)
    found = [one for one in holders if not any(other.includes(one) for other in holders if other is not one)]
    if len(found) > 1:
        most = max(found, key=lambda lineage: (lineage.work_missing_in(()), lineage))
        found = [lineage for lineage in found if lineage.related(most)]
    if len(found) == 1:
        return (Head(found[0], tuple(holders[found[0]]), 1.0),)
    work = [lineage.work_missing_in([other for other in found if other is not lineage]) for lineage in found]
    total = sum(work)
    heads = [
        Head(lineage, tuple(holders[lineage]), amount / total if total else 1 / len(found))
        for lineage, amount in zip(found, work, strict=True)
    ]
    return tuple(sorted(heads, key=lambda head: (-head.weight, head.ranks)))


def find_discarded(models: dict[int, Lineage], heads: Sequence[Head]) -> dict[int, int]:
    """Return how many steps are in a model and in no head, by rank: those who have such models began separately."""
    kept = [head.lineage for head in heads]
    lost = {rank: lineage for rank, lineage in models.items() if not any(one.includes(lineage) for one in kept)}
    return {rank: lineage.steps_missing_in(kept) for rank, lineage in lost.items()}


def merge(heads: Sequence[Head], view: ViewId, workers: int) -> Lineage:
    """Return the lineage of the model that all members have once a view with these heads is aligned."""
    if len(heads) == 1:
        return heads[0].lineage
    largest: dict[ViewId, Steps] = {view: Steps(view, 0, workers)}
    for head in heads:
        for part in head.lineage.parts:
            if part.view not in largest or largest[part.view].made < part.made:
                largest[part.view] = part
    return Lineage(max(head.lineage.step for head in heads), view, _sorted(largest.values()))


def _sorted(parts: Iterable[Steps]) -> tuple[Steps, ...]:
    return tuple(sorted(parts))[-MAX_VIEWS:]
