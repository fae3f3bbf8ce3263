"""Models that were trained separately, on the two sides of a partition, are averaged when the sides meet again.

Each worker in lockstep knows which steps are in its model (``lineage``). When the members of a new
generation compare them, a model that is behind another is replaced by it. Models of which none is behind the other are
averaged, each side by the work that only it has done.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.process.state.lineage import ROOT, Head, Lineage, Steps, ViewId, find_discarded, find_heads, merge
from gossamer.process.state.state_transfer import TransferableState, move_state

MAX_TEXT_BYTES = 1 << 20


class Standing(NamedTuple):
    """What a member says about its model."""

    lineage: Lineage | None
    """``None``: it has no model of this run."""
    checksum: float
    """Of its weights: whether members at the same step have the same."""


class Part(NamedTuple):
    """A model that goes into the average: who sends it, how much it counts."""

    member: int
    weight: float


def exchange_standings(gather: Callable[[Tensor], list[Tensor]], own: Standing) -> list[Standing]:
    """Return what all members say. ``gather(tensor)``: the tensors of all members, which have the same shape."""
    return [_parse(text) for text in gather_texts(gather, json.dumps(own).encode())]


def gather_texts(gather: Callable[[Tensor], list[Tensor]], own: bytes) -> list[bytes]:
    """Return the texts of all members, which may differ in length."""
    lengths = [int(length) for length in gather(torch.tensor([len(own)]))]
    if not 0 < max(lengths) <= MAX_TEXT_BYTES:
        raise RuntimeError(f"what a member says about itself has {max(lengths)} bytes")
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    rows = gather(padded)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


def _parse(text: bytes) -> Standing:
    try:
        lineage, checksum = json.loads(text)
        if lineage is not None:
            step, head, parts = lineage
            parts = tuple(Steps(_view(view), int(made), int(workers)) for view, made, workers in parts)
            lineage = Lineage(int(step), _view(head), parts)
        return Standing(lineage, float(checksum))
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"what a member says about its model cannot be read: {error}") from None


def _view(row: Any) -> ViewId:
    number, leader, process = row
    return ViewId(int(number), int(leader), int(process))


def heads_of(standings: Sequence[Standing]) -> tuple[Head, ...]:
    """Return the models that are behind no other, by index of the member; empty if nobody has one."""
    models = _models(standings)
    return find_heads(models) if models else ()


def discarded_of(standings: Sequence[Standing], heads: Sequence[Head]) -> dict[int, int]:
    """Return how many steps members lose whose models have nothing in common with those that go on, by index."""
    return find_discarded(_models(standings), heads)


def _models(standings: Sequence[Standing]) -> dict[int, Lineage]:
    return {index: standing.lineage for index, standing in enumerate(standings) if standing.lineage is not None}


def parts_of(heads: Sequence[Head], standings: Sequence[Standing]) -> list[Part]:
    """Return whose models are averaged: one of each side, or all of a side whose members have different ones."""
    parts = []
    for head in heads:
        same = len({standings[index].checksum for index in head.ranks}) == 1
        senders = head.ranks[:1] if same else head.ranks
        parts += [Part(index, head.weight / len(senders)) for index in senders]
    return parts


def merge_states(
    broadcast: Callable[[Tensor, int], Tensor], state: TransferableState, parts: Sequence[Part], own: int
) -> None:
    """Replace the model of every member by the average. ``broadcast(tensor, index)``: that of member ``index``.

    Every member adds up the same numbers in the same order, so all get the same to the bit. What cannot be averaged,
    such as counters, is that of the first part.
    """
    exported = state.export_state() if any(part.member == own for part in parts) else None
    merged: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for number, part in enumerate(parts):
        tensors, theirs = move_state(
            lambda tensor, index=part.member: broadcast(tensor, index),  # type: ignore[misc]
            exported if part.member == own else None,
        )
        if number == 0:
            merged, rest = {name: tensor.clone() for name, tensor in tensors.items()}, theirs
            for tensor in filter(_is_averaged, merged.values()):
                tensor.mul_(part.weight)
            continue
        rest["step"] = max(rest["step"], theirs["step"])
        for name, tensor in tensors.items():
            if name in merged and merged[name].shape == tensor.shape and _is_averaged(merged[name]):
                merged[name].add_(tensor, alpha=part.weight)
    state.import_state(merged, rest)


def _is_averaged(tensor: Tensor) -> bool:
    """Whether a tensor is averaged. Counts of steps have no dimension."""
    return tensor.is_floating_point() and tensor.dim() > 0


def describe(heads: Sequence[Head], members: Sequence[int]) -> str:
    """Return what happened, for people."""

    def side(head: Head) -> str:
        ranks = [members[index] for index in head.ranks]
        return f"{head.weight:.0%} of worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

    return "workers that trained separately were averaged: " + ", ".join(map(side, heads))


def describe_discarded(discarded: Mapping[int, int], members: Sequence[int]) -> str:
    """Return what was lost, for people."""
    ranks = ", ".join(str(members[index]) for index in discarded)
    whose = f"worker{'s' if len(discarded) > 1 else ''} {ranks}"
    return (
        f"{max(discarded.values())} steps of {whose} were discarded: models that began separately, or have been apart "
        "for too long, have nothing in common and cannot be averaged"
    )


def merged_lineage(heads: Sequence[Head], view: ViewId, workers: int) -> Lineage:
    """Return the lineage of every member afterwards."""
    return merge(heads, view, workers) if heads else ROOT
