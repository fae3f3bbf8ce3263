"""Long vectors in huge pages, where the system has them.

A vector of 20 MB lies in ten of them instead of in 5,000 small ones, and a pass over it takes a fifth to a third less
time: less is spent on finding out where each page is.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

HUGE = 1 << 21
"""Bytes of a huge page, and of the shortest vector that is worth one."""


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of zeros on ``device``, which lives as long as a worker does."""
    length = size * dtype.itemsize
    if device.type != "cpu" or length < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, length + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A system may have been built without them.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE
    return torch.frombuffer(memory, dtype=dtype, count=size, offset=start)
