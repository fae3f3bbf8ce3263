"""Rows of a matrix: gathered into one block and written back, averaged, compared."""

from __future__ import annotations

import math

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


def mean(data: Tensor, ranks: list[int]) -> Tensor:
    """The mean of these rows."""
    if len(ranks) == len(data):
        return data.mean(0)
    total = data[ranks[0]].clone()
    for rank in ranks[1:]:
        total += data[rank]
    return total / len(ranks)


def spread(data: Tensor, ranks: list[int]) -> float:
    """sqrt(mean_i ‖x_i − x̄‖²) over these rows."""
    # As seen from one of them, so that rows alike to the bit are at distance 0: a mean would have rounded.
    one = data[ranks[0]]
    squares = torch.zeros((), dtype=torch.float64, device=data.device)
    shift = torch.zeros_like(one)
    chunk = max(1, GATHER_BYTES // max(1, 2 * one.nbytes)) if one.nbytes < WIDE_BYTES else 1
    for at in range(0, len(ranks), chunk):
        off = data[ranks[at : at + chunk]] - one
        shift += off.sum(0)
        squares += off.square_().sum(dtype=torch.float64)
    mean_square = float(squares) / len(ranks) - float((shift / len(ranks)).square_().sum(dtype=torch.float64))
    return math.sqrt(max(0.0, mean_square)) if math.isfinite(mean_square) else math.inf
