"""Which models are behind others, which are averaged, and how much each counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.process.state import merging
from gossamer.process.state.lineage import ROOT, Lineage, ViewId
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
