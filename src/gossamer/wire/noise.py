"""Random numbers for stochastic rounding, from a table.

To draw one random number takes longer than everything else that a codec does with an element. So a table holds a random
permutation of evenly spaced numbers, and each part of each message reads it from a random position on. Over all
positions an element meets every number of the table equally often: its rounding is right on average, to one part in
``TABLE_SIZE``. CPU and GPU read the same numbers.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gossamer.wire.codec import BLOCK, SEGMENT, Part

TABLE_SIZE = 1 << 18
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Return 64 bits that depend on all of ``numbers``, as SplitMix64 mixes them."""
    state = 0
    for number in numbers:
        state = (state + number + 1) * 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def uniform(seed: int, part: Part, device: torch.device) -> Tensor:
    """Return float32 numbers between 0 and 1 for the elements of ``part``, one block per row."""
    return _read(_table(device, integers=False), seed, part)


def bits16(seed: int, part: Part, device: torch.device) -> Tensor:
    """Return int32 numbers from 0 to 65,535 for the elements of ``part``, one block per row."""
    return _read(_table(device, integers=True), seed, part)


@lru_cache(maxsize=16)
def _table(device: torch.device, integers: bool) -> Tensor:
    order = torch.randperm(TABLE_SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    numbers = order % (1 << 16) if integers else (order + 0.5) / TABLE_SIZE
    # A part that starts near the end goes on at the beginning.
    return torch.cat((numbers, numbers[:SEGMENT])).to(device)


def _read(table: Tensor, seed: int, part: Part) -> Tensor:
    if part.size <= SEGMENT:
        position = mix(seed, part.index) % TABLE_SIZE
        return table[position : position + part.size].view(-1, BLOCK)
    segments = range(part.index, part.index + part.size // SEGMENT)
    positions = torch.tensor([mix(seed, segment) % TABLE_SIZE for segment in segments])
    positions = positions.to(table.device, non_blocking=True)
    # Row p of this view is the table from position p on.
    return table.as_strided((TABLE_SIZE, SEGMENT), (1, 1))[positions].view(-1, BLOCK)
