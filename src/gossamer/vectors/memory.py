"""Memory for long vectors on the CPU: huge pages, and a C library that keeps freed blocks."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 1 << 21
"""Size of a huge page, and of the shortest vector that gets one."""

MAX_HEAP_BLOCK_BYTES = 1 << 25
"""glibc allocates longer blocks by mmap, and returns them to the system as soon as they are freed."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector of zeros on ``device``, for long use; on the CPU in huge pages, where the system has them.

    A vector of 20 MB takes ten huge pages instead of 5,000 small ones. A pass over it takes 20 to 33% less time: there
    are fewer addresses to translate.
    """
    length = size * dtype.itemsize
    if device.type != "cpu" or length < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, length + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        # Out of memory: torch raises the error that callers expect.
        return torch.zeros(size, dtype=dtype, device=device)
    # A kernel without huge pages refuses the advice.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    return torch.frombuffer(memory, dtype=dtype, count=size, offset=start)


def zeros_like(tensor: Tensor) -> Tensor:
    """Return zeros in the shape of ``tensor``, allocated by ``zeros``."""
    return zeros(tensor.numel(), tensor.dtype, tensor.device).view(tensor.shape)


def retain_freed_blocks(block_bytes: int) -> None:
    """Let glibc keep freed blocks of ``block_bytes`` for the next allocation, if it does not do so by itself.

    This is a setting of the whole process (``mallopt``) and cannot be undone: memory that was freed is not returned to
    the system any more. Without it, every temporary of more than 32 MiB (a gradient, an optimizer's intermediate) is
    mapped and zeroed anew. Simulating 4 workers of 12 M parameters on two cores took 1.8 times as long without it
    (SGD; AdamW: 2.5 times), with a resident size of 1.3 instead of 1.6 GB. Smaller models change nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if block_bytes > MAX_HEAP_BLOCK_BYTES and mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
