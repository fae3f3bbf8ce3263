"""Top-k: the largest elements by magnitude, as values and indices.

With ``k = ceil(n / ratio)`` every worker sends ``k`` values and ``k`` indices of four bytes. A float32 message is
``2n/ratio`` numbers long, twice what the ratio says. Every worker selects its own elements, so an all-reduce cannot sum
the messages: they are gathered, and summed in rank order.

‖v − kept‖² ≤ (1 − k/n) ‖v‖².

Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from gossamer.compress.compressor import Averaging, Part, check_ratio, num_kept
from gossamer.effects import Gather
from gossamer.errors import InputError
from gossamer.vectors.vector_math import CHUNK, chunks

if TYPE_CHECKING:
    from gossamer.worker import Worker

SAMPLE_SIZE = 1 << 16
"""Number of elements from which the bound on the largest ones is estimated."""

CANDIDATE_FACTOR = 1.25
"""Expected number of elements above the estimated bound, as a multiple of those wanted."""


def largest(vector: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest elements by magnitude, in no particular order.

    On the CPU a long vector takes one pass: a sample gives a bound that more than ``count`` elements should exceed, and
    only those are candidates. If they turn out to be too few, all elements are.
    """
    if vector.device.type == "cpu" and vector.dtype == torch.float32 and count * 8 < len(vector) > 4 * SAMPLE_SIZE:
        sample = vector[:: len(vector) // SAMPLE_SIZE].abs()
        rank = len(sample) - math.ceil(CANDIDATE_FACTOR * count * len(sample) / len(vector)) - 1
        bound = float(sample.kthvalue(max(rank, 0) + 1).values)
        # Not "greater": NaN counts as the largest, as in torch.topk.
        above = [
            np.flatnonzero(~(np.abs(chunk.numpy()) <= bound)) + number * CHUNK
            for number, (chunk,) in enumerate(chunks(vector))
        ]
        candidates = torch.from_numpy(np.concatenate(above))
        if len(candidates) >= count:
            return candidates[vector[candidates].abs().topk(count, sorted=False).indices]
    return vector.abs().topk(count, sorted=False).indices


@dataclass(frozen=True)
class TopK:
    """The n/ratio largest elements by magnitude, sent with their indices."""

    ratio: float
    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        if vector.numel() > torch.iinfo(torch.int32).max:
            raise InputError(f"topk addresses at most 2^31 elements, not {vector.numel()}: use randomblock or int8")
        indices = largest(vector, num_kept(vector.numel(), self.ratio))
        values = vector[indices]
        answers = yield Gather((values, indices.to(torch.int32)), round, topic)

        mean = [Part(their_values, their_indices, 1 / len(answers)) for their_values, their_indices in answers]
        return mean, Part(values, indices)

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return num_kept(num_elements, self.ratio) * (itemsize + 4)
