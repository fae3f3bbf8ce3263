"""Int8: one byte per element, the 8 bits in which two workers may differ (``gossamer.wire.lattice``).

With 4-fold headroom the step is between 1/31 and 1/15 of the largest distance in the block. So what rounding adds to an
exchange is small beside what the two workers differ by, whatever the size of their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.wire import lattice
from gossamer.wire.codec import BLOCK, block_max

BITS = 8


@dataclass(frozen=True)
class Int8:
    """One byte per element, relative to how far apart the two ends are."""

    name: ClassVar[str] = "int8"
    block: ClassVar[int] = BLOCK
    headroom: ClassVar[float] = 4.0

    def size_bytes(self, num_elements: int) -> int:
        return lattice.size_bytes(num_elements, BITS)

    def first_reach(self, vector: Tensor) -> Tensor:
        """Guess that models which started alike differ by up to an eighth of a block's largest element.

        Where a block is still zero on one of them: by a 64th of the model's root mean square. Where that is not enough,
        a block is void, and the next message has more reach. A larger guess would add noise to trained models.
        """
        rms = torch.linalg.vector_norm(vector, dtype=torch.float64) / max(len(vector), 1) ** 0.5
        return torch.maximum(block_max(vector, BLOCK) / 8, rms.float() / 64).nan_to_num_(0.0, 0.0, 0.0)

    def encode(
        self, vector: Tensor, reach: Tensor | None, seed: int, message: Tensor, lost: Tensor | None = None
    ) -> None:
        lattice.encode(vector, reach, seed, BITS, message, lost)

    def decode(self, message: Tensor, reference: Tensor, out: Tensor, weight: float = 1.0) -> Tensor:
        return lattice.decode(message, reference, out, BITS, weight)
