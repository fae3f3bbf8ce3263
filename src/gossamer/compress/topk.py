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
from gossamer.vectors.vector_math import CHUNK

if TYPE_CHECKING:
    from gossamer.worker import Worker

SAMPLE_SIZE = 1 << 14
"""Number of elements from which the bound on the largest ones is estimated."""

MIN_LENGTH = 1 << 18
"""From this length on, a bound is estimated."""


def largest(vector: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest elements by magnitude, and their indices, ascending.

    On the CPU a long vector takes one pass: a sample gives a bound that more than ``count`` elements should exceed, and
    only those are candidates. If they turn out to be too few, all elements are. Which elements are found depends on the
    bound only among those of equal magnitude.
    """
    if vector.device.type == "cpu" and vector.dtype == torch.float32 and count * 8 < len(vector) > MIN_LENGTH:
        values, indices = exceeding(vector, bound_on_largest(vector, count))
        if len(values) >= count:
            # NaN counts as the largest, as in torch.topk.
            chosen = np.sort(np.argpartition(np.abs(values), -count)[-count:])
            return torch.from_numpy(values[chosen]), torch.from_numpy(indices[chosen])
    of_all = vector.abs().topk(count, sorted=False).indices.sort().values
    return vector[of_all], of_all


def bound_on_largest(vector: Tensor, count: int) -> float:
    """Return a number that the ``count`` largest elements exceed in magnitude, in all likelihood, and few others."""
    sample = vector[:: len(vector) // SAMPLE_SIZE].abs().numpy()
    expected = count * len(sample) / len(vector)
    # Four standard deviations more than are expected.
    rank = max(len(sample) - math.ceil(expected + 4 * math.sqrt(expected)) - 1, 0)
    return float(np.partition(sample, rank)[rank])


def exceeding(vector: Tensor, bound: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements that are larger than ``bound`` in magnitude, or NaN, and their indices, ascending."""
    values, indices, magnitudes = [], [], torch.empty(CHUNK, dtype=vector.dtype)
    for start in range(0, len(vector), CHUNK):
        # A slice, not its memory: vectors of the virtual world give none of theirs away.
        chunk = vector[start : start + CHUNK]
        torch.abs(chunk, out=magnitudes[: len(chunk)])
        found = np.flatnonzero(~(magnitudes[: len(chunk)].numpy() <= bound))
        values.append(chunk[torch.from_numpy(found)].numpy())
        indices.append(found + start)
    return np.concatenate(values), np.concatenate(indices)


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
        values, indices = largest(vector, num_kept(vector.numel(), self.ratio))
        answers = yield Gather((values, indices.to(torch.int32)), round, topic)

        mean = [Part(their_values, their_indices, 1 / len(answers)) for their_values, their_indices in answers]
        return mean, Part(values, indices)

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return num_kept(num_elements, self.ratio) * (itemsize + 4)
