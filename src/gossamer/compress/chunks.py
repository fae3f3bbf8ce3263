"""A flat vector as chunks of equal length, each with its own scale."""

from __future__ import annotations

import torch
from torch import Tensor


def split(vector: Tensor, chunk: int) -> list[Tensor]:
    """Return views with one chunk per row: all full chunks, and the shorter last one if there is one."""
    num_full = vector.numel() // chunk * chunk
    parts = (vector[:num_full].view(-1, chunk), vector[num_full:].view(1, -1))
    return [part for part in parts if part.numel()]


def norms(vector: Tensor, chunk: int, order: float) -> Tensor:
    """Return the norm of every chunk, accumulated at least in float32."""
    wide = torch.promote_types(vector.dtype, torch.float32)
    return torch.cat([torch.linalg.vector_norm(part, order, dim=1, dtype=wide) for part in split(vector, chunk)])


def multiply_(vector: Tensor, scales: Tensor, chunk: int) -> Tensor:
    """Multiply every chunk by its scale, in place."""
    first = 0
    for part in split(vector, chunk):
        part.mul_(scales[first : first + len(part), None])
        first += len(part)
    return vector


def divide(vector: Tensor, scales: Tensor, chunk: int) -> Tensor:
    """Return a copy with every chunk divided by its scale."""
    quotient = vector.clone()
    first = 0
    for part in split(quotient, chunk):
        part.div_(scales[first : first + len(part), None])
        first += len(part)
    return quotient


def num_chunks(num_elements: int, chunk: int) -> int:
    return -(-num_elements // chunk)
