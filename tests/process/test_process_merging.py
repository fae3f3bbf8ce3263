"""Which models are behind others, which are averaged, and how much each counts."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.process.metrics import Metrics
from gossamer.process.roster.roster import KnownRoster, Roster
from gossamer.process.state import merging
from gossamer.process.state.alignment import align
from gossamer.process.state.lineage import MAX_VIEWS, ROOT, Lineage, Steps, ViewId
from gossamer.process.state.merging import Part, Standing


def after(lineage: Lineage, generation: int, members: list[int], steps: int) -> Lineage:
    for _ in range(steps):
        lineage = lineage.after_step(ViewId(generation, members[0], 1), len(members))
    return lineage


def standings(*lineages: Lineage | None) -> list[Standing]:
    return [Standing(lineage, 1.0) for lineage in lineages]


def test_a_model_that_is_behind_is_not_averaged() -> None:
    common = after(ROOT, 0, [0, 1, 2], 5)
    ahead = after(common, 0, [0, 1, 2], 1)
    (head,) = merging.heads_of(standings(common, ahead, None))
    assert (head.ranks, head.weight) == ((1,), 1.0)
    # Nobody has a model at the start.
    assert merging.heads_of(standings(None, None)) == ()


def test_each_side_counts_by_what_only_it_has_done() -> None:
    common = after(ROOT, 0, [0, 1, 2], 5)
    left, right = after(common, 1, [0, 1], 30), after(common, 1, [2], 40)
    heads = merging.heads_of(standings(left, left, right))
    assert [(head.ranks, head.weight) for head in heads] == [((0, 1), 0.6), ((2,), 0.4)]
    merged = merging.merged_lineage(heads, ViewId(2, 0, 1), 3)
    assert merged.step == 45
    assert merged.includes(left)
    assert merged.includes(right)
    # Whoever has not averaged when the next fault comes takes over from those that have.
    (head,) = merging.heads_of(standings(merged, left, right))
    assert head.ranks == (0,)


def test_sides_with_the_same_number_of_steps_are_told_apart() -> None:
    common = after(ROOT, 0, [0, 1], 5)
    heads = merging.heads_of(standings(after(common, 1, [0], 7), after(common, 1, [1], 7)))
    assert [head.weight for head in heads] == [0.5, 0.5]


def test_all_of_a_side_count_if_their_models_differ() -> None:
    left, right = after(ROOT, 1, [0, 1], 3), after(ROOT, 1, [2], 2)
    rows = [Standing(left, 1.0), Standing(left, 2.0), Standing(right, 3.0)]
    assert merging.parts_of(merging.heads_of(rows), rows) == [Part(0, 0.375), Part(1, 0.375), Part(2, 0.25)]


def test_what_a_member_says_is_read_strictly() -> None:
    own = Standing(after(ROOT, 3, [0, 2], 2), 0.1)
    assert merging.exchange_standings(lambda tensor: [tensor, tensor], own) == [own, own]
    for text in (b"", b"[1]", b'[["x", 1, 2], 1.0]', b"[[1, [1, 2], []], 1.0]", b"\xff"):
        with pytest.raises(RuntimeError):
            merging._parse(text)


class Model:
    """A state to be averaged, and what it became."""

    lineage: Lineage | None = None
    lockstep = True

    def __init__(self, value: float, step: int) -> None:
        self.tensors = {"x": torch.full((3,), value), "optimizer/0/step": torch.tensor(float(step))}
        self.tensors["buffer/count"] = torch.tensor([step])
        self.step = step

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}, {"step": self.step}

    def import_state(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        self.tensors, self.step = tensors, rest["step"]


def test_the_average_is_the_same_on_all_members() -> None:
    parts = [Part(0, 0.75), Part(2, 0.25)]
    sent: dict[int, list[Tensor]] = {0: [], 2: []}
    models = [Model(1.0, 10), Model(9.0, 3), Model(5.0, 12)]
    exported = {index: models[index].export_state() for index in (0, 2)}
    for index in sent:
        merging.move_state(lambda tensor, index=index: sent[index].append(tensor.clone()) or tensor, exported[index])
    for own, model in enumerate(models):
        received = {index: iter(tensors) for index, tensors in sent.items()}
        merging.merge_states(lambda tensor, index: next(received[index]), model, parts, own)  # type: ignore[arg-type]  # noqa: B023
    for model in models:
        assert model.tensors["x"].tolist() == [2.0, 2.0, 2.0]
        assert model.step == 12
        # Counters cannot be averaged: those of the side that did most.
        assert (int(model.tensors["optimizer/0/step"]), int(model.tensors["buffer/count"])) == (10, 10)


def began_separately(steps: int) -> Lineage:
    return after(Lineage(0, ViewId(5, 7, 7), (Steps(ViewId(5, 7, 7), 0, 1),)), 6, [7], steps)


def test_ten_minutes_of_churn_do_not_make_two_sides_strangers() -> None:
    """Six workers, of which one dies every 2.5 seconds and comes back: two views each time."""
    common = after(ROOT, 0, [0, 1, 2], 5)
    there = common
    for generation in range(1, 2 * 240):
        there = after(there, generation, [0, 1], 1)
    away = after(common, 1, [2], 40)
    heads = merging.heads_of(standings(there, there, away))
    assert sorted(head.ranks for head in heads) == [(0, 1), (2,)]
    assert merging.discarded_of(standings(there, there, away), heads) == {}
    # What all members say still fits into one message each.
    for generation in range(480, 2000):
        there = after(there, generation, [0, 1], 1)
    assert len(there.parts) == MAX_VIEWS
    assert len(json.dumps(Standing(there, 1.0))) < 64 * 1024


def test_what_is_lost_with_a_model_that_began_separately_is_counted() -> None:
    ahead, separate = after(ROOT, 0, [0, 1], 9), began_separately(4)
    models = standings(ahead, separate, began_separately(3), None)
    heads = merging.heads_of(models)
    assert [head.ranks for head in heads] == [(0,)]
    assert merging.discarded_of(models, heads) == {1: 4, 2: 3}


class Exchange:
    """What the members of a group in threads of one process give each other."""

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def all(self, own: int, value: Any) -> list[Any]:
        self.given[own] = value
        self.barrier.wait(60)
        given = list(self.given)
        self.barrier.wait(60)
        return given


class Group:
    def __init__(self, exchanged: Exchange, own: int) -> None:
        self._exchanged, self._own = exchanged, own

    def rank(self) -> int:
        return self._own

    def allgather(self, into: list[list[Tensor]], tensors: list[Tensor]) -> None:
        for row, given in zip(into[0], self._exchanged.all(self._own, tensors[0]), strict=True):
            row.copy_(given)

    def exchange(self, sent: Tensor | None, received: Tensor | None, to: int, source: int) -> None:
        given = self._exchanged.all(self._own, sent)
        if received is not None:
            received.copy_(given[source])


class State(Model):
    """A worker's state while its members are aligned."""

    def __init__(self, value: float, lineage: Lineage) -> None:
        super().__init__(value, lineage.step)
        self.lineage, self.roster, self.metrics, self.said = lineage, KnownRoster(Roster(2)), Metrics(), list[str]()

    def checksum(self) -> float:
        return float(self.tensors["x"][0])

    def on_membership_change(self, roster: Roster | None = None) -> None:
        pass

    def on_discard(self, steps: int, text: str) -> None:
        self.metrics.discarded += steps
        self.said.append(text)


def test_all_members_say_whose_steps_are_discarded_and_those_count_them() -> None:
    states = [State(1.0, after(ROOT, 0, [0, 1], 9)), State(5.0, began_separately(4))]
    exchanged = Exchange(2)

    def member(own: int) -> None:
        group: Any = Group(exchanged, own)
        align(group, lambda work: None, states[own], states[own].step, ViewId(7, 0, 1), [3, 6])  # type: ignore[arg-type]

    threads = [threading.Thread(target=member, args=(own,)) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [state.tensors["x"].tolist() for state in states] == [[1.0] * 3] * 2
    assert [state.metrics.discarded for state in states] == [0, 4]
    assert states[0].said == states[1].said
    (line,) = states[0].said
    assert line.startswith("4 steps of worker 6 were discarded: ")
