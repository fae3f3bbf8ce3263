"""A tiny world of fake workers that answer each other's ``Mean`` and ``Gather`` in lock step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.compress import Part, add_parts
from gossamer.effects import Gather, Mean


@dataclass
class FakeWorker:
    """Just what compressors look at."""

    rank: int = 0
    num_workers: int = 1
    seed: int = 7
    like: Tensor = field(default_factory=lambda: torch.zeros(1))
    vectors: dict[str, Tensor] = field(default_factory=dict)

    def vector(self, name: str, size: int | None = None) -> Tensor:
        length = self.like.numel() if size is None else size
        kept = self.vectors.setdefault(name, self.like.new_zeros(length))
        assert kept.numel() == length
        return kept


def make_workers(num_workers: int, like: Tensor, seed: int = 7) -> list[FakeWorker]:
    return [FakeWorker(rank, num_workers, seed, like) for rank in range(num_workers)]


def together(generators: list[Generator]) -> tuple[list[Any], list[int]]:
    """Run all to their end; returns what each returned, and how many bytes each sent."""
    answers: list[Any] = [None] * len(generators)
    num_bytes = [0] * len(generators)
    meetings = set()
    returned = []
    while True:
        effects = []
        for generator, answer in zip(generators, answers, strict=True):
            try:
                effects.append(generator.send(answer))
            except StopIteration as end:
                returned.append(end.value)
        if returned:
            assert len(returned) == len(generators), "some workers ended before others"
            return returned, num_bytes
        kinds = {(type(effect), effect.round, effect.topic) for effect in effects}
        assert len(kinds) == 1, f"workers asked for different things: {kinds}"
        assert not kinds & meetings, f"the same topic twice in one round: {kinds}"
        meetings |= kinds
        for rank, effect in enumerate(effects):
            num_bytes[rank] += sum(tensor.numel() * tensor.itemsize for tensor in sent(effect))
        answers = answer_all(effects)


def sent(effect: Mean | Gather) -> tuple[Tensor, ...]:
    return (effect.vector,) if isinstance(effect, Mean) else effect.tensors


def answer_all(effects: list[Any]) -> list[Any]:
    if isinstance(effects[0], Mean):
        mean = torch.stack([effect.vector for effect in effects]).mean(0)
        return [mean] * len(effects)
    gathered = [tuple(tensor.clone() for tensor in effect.tensors) for effect in effects]
    return [list(gathered) for _ in effects]


def average_all(
    compressor: Any, vectors: list[Tensor], round: int = 0, workers: list[FakeWorker] | None = None
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The means, the kept parts and the bytes sent of one averaging."""
    workers = workers or make_workers(len(vectors), vectors[0])
    before = [vector.clone() for vector in vectors]
    generator: Callable[..., Any] = compressor.average
    returned, num_bytes = together(
        [generator(worker, vector, round, "test") for worker, vector in zip(workers, vectors, strict=True)]
    )
    for vector, copy in zip(vectors, before, strict=True):
        torch.testing.assert_close(vector, copy, rtol=0, atol=0, equal_nan=True)
    means = [dense(parts, vector) for (parts, _), vector in zip(returned, vectors, strict=True)]
    kept = [dense([part], vector) for (_, part), vector in zip(returned, vectors, strict=True)]
    return means, kept, num_bytes


def dense(parts: list[Part], like: Tensor) -> Tensor:
    """The sum of parts as a new vector."""
    vector = torch.zeros_like(like)
    add_parts(vector, parts)
    return vector
