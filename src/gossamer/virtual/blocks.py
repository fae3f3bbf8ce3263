"""Rows of a matrix, gathered into one block and written back."""

from __future__ import annotations

import torch
from torch import Tensor

GATHER_BYTES = 256 << 20
"""How much may be gathered from a matrix at a time."""

WIDE_BYTES = 1 << 20
"""Rows at least this long are worked on one by one, where they lie: copying them would cost more than it saves."""


def scatter(data: Tensor, index: Tensor, block: Tensor) -> None:
    """``data[index] = block``, for rows that differ."""
    if data.device.type == "cpu" and data.dtype in (torch.float32, torch.float64):
        # On CPU, torch's own takes six times as long.
        data.numpy()[index.numpy()] = block.numpy()
    else:
        data.index_copy_(0, index, block)
