"""Runs a whole program as one GPU kernel: every block takes its columns through all operations.

Operations are element by element, so blocks never wait for each other, and what one operation wrote is still in the
cache when the next one reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.virtual.compute.executor import FIELDS, Program

BLOCK_COLUMNS = 256


class TritonExecutor:
    """Interprets programs on the GPU. The handle of a vector is its address."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.element = getattr(tl, str(dtype).removeprefix("torch."))

    def handle(self, vector: Tensor) -> float:
        assert vector.is_contiguous()
        # Addresses have at most 48 bits, so a double holds them exactly, and one table holds addresses and factors.
        return float(vector.data_ptr())

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        if not programs:
            return []
        fields = np.concatenate([np.array(program, dtype=np.float64) for program, _ in programs])
        fields = fields.reshape(-1, FIELDS)
        # Non-blocking, so that the CPU goes on while the GPU is busy. The calls return after the arrays were read.
        vectors = torch.from_numpy(fields[:, :2].astype(np.int64)).to(self.device, non_blocking=True)
        factors = torch.from_numpy(fields[:, 2:].copy()).to(self.device, non_blocking=True)
        runs: list[Callable[[], None]] = []
        start = 0
        for program, width in programs:
            end = start + len(program) // FIELDS
            runs.append(partial(self._run, vectors[start:end], factors[start:end], width))
            start = end
        return runs

    def _run(self, vectors: Tensor, factors: Tensor, width: int) -> None:
        grid = (triton.cdiv(width, BLOCK_COLUMNS),)
        with torch.cuda.device(self.device):
            _interpret[grid](vectors, factors, len(vectors), width, element=self.element, block=BLOCK_COLUMNS)


@triton.jit
def _interpret(vectors, factors, count, width, element: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = columns < width
    for k in range(count):
        y = tl.load(vectors + 2 * k).to(tl.pointer_type(element)) + columns
        v = tl.load(vectors + 2 * k + 1).to(tl.pointer_type(element)) + columns
        keep, factor = tl.load(factors + 2 * k), tl.load(factors + 2 * k + 1)
        scale = factor.to(element)
        other = tl.load(v, inside)
        if keep == 0.0:
            tl.store(y, scale * other, inside)
        else:
            old = tl.load(y, inside)
            if keep == 1.0:
                tl.store(y, old + scale * other, inside)
            elif keep + factor == 1.0:
                tl.store(y, old + scale * (other - old), inside)
            else:
                tl.store(y, keep.to(element) * old + scale * other, inside)
        # Another thread of the block may read in the next operation what this one wrote.
        tl.debug_barrier()
