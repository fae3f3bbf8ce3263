"""Random block: one contiguous block of the vector per round, the same one on all workers.

The block has ``ceil(n / ratio)`` elements. Its offset is drawn from (seed, round, topic), so all workers know it, and
the blocks can be all-reduced. A block wraps around at the end of the vector: otherwise elements near the ends would be
drawn less often.

In expectation ‖v − kept‖² = (1 − k/n) ‖v‖².
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from gossamer.compress.compressor import Averaging, Part, check_ratio, num_kept
from gossamer.effects import Mean

if TYPE_CHECKING:
    from gossamer.worker import Worker


@dataclass(frozen=True)
class RandomBlock:
    """A contiguous block of n/ratio elements, drawn anew each round, the same on all workers."""

    ratio: float
    name: ClassVar[str] = "randomblock"

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        size = num_kept(vector.numel(), self.ratio)
        start = _offset(worker.seed, round, topic, vector.numel())
        indices = torch.arange(start, start + size, device=vector.device).remainder_(vector.numel())
        block = vector[indices]
        answer = yield Mean(block, round, topic)
        return [Part(answer, indices)], Part(block, indices)

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return num_kept(num_elements, self.ratio) * itemsize


def _offset(seed: int, round: int, topic: str, num_elements: int) -> int:
    """Return the index at which the block of this round begins."""
    # Masked, because a generator accepts no negative numbers; crc32, because str.__hash__ differs between processes.
    entropy = [seed & (2**64 - 1), round, zlib.crc32(topic.encode())]
    return int(np.random.default_rng(entropy).integers(num_elements))
