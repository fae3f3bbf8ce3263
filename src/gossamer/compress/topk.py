"""Top-k: the largest elements by magnitude, as values and indices.

With ``k = ceil(n / ratio)`` every worker sends ``k`` values and ``k`` indices of four bytes, so a float32
message is ``2n/ratio`` numbers long: half as small as the ratio says. Each worker's choice is its own, so
messages are gathered rather than summed under way, and summed in rank order.

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

from gossamer.compress.compressor import Averaging, check_ratio, num_kept
from gossamer.effects import Gather
from gossamer.errors import InputError
from gossamer.vector_math import CHUNK, chunks

if TYPE_CHECKING:
    from gossamer.worker import Worker

SAMPLED = 1 << 16
"""About so many elements tell how large the largest are."""

SPARE = 1.25
"""Candidates that the sample should leave, times those wanted."""


def largest(vector: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest elements by magnitude, in no order.

    On the CPU a long vector is searched in one pass: a sample gives a bound that more than ``count`` elements should
    exceed, and only those are sorted out. Where they are too few after all, everything is.
    """
    if vector.device.type == "cpu" and vector.dtype == torch.float32 and count * 8 < len(vector) > 4 * SAMPLED:
        sample = vector[:: len(vector) // SAMPLED].abs()
        rank = len(sample) - math.ceil(SPARE * count * len(sample) / len(vector)) - 1
        bound = float(sample.kthvalue(max(rank, 0) + 1).values)
        # Not "greater": what is not a number counts as the largest, here as in topk.
        found = [
            np.flatnonzero(~(np.abs(piece.numpy()) <= bound)) + at * CHUNK for at, (piece,) in enumerate(chunks(vector))
        ]
        candidates = torch.from_numpy(np.concatenate(found))
        if len(candidates) >= count:
            return candidates[vector[candidates].abs().topk(count, sorted=False).indices]
    return vector.abs().topk(count, sorted=False).indices


@dataclass(frozen=True)
class TopK:
    """The n/ratio largest elements by magnitude; as many indices travel with the values."""

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

        kept = torch.zeros_like(vector)
        kept[indices] = values
        mean = torch.zeros_like(vector)
        for their_values, their_indices in answers:
            # One worker's indices are all different, so no order of addition is left to chance.
            mean.index_add_(0, their_indices, their_values)
        return mean.div_(len(answers)), kept

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return num_kept(num_elements, self.ratio) * (itemsize + 4)
