"""A whole program as one GPU kernel: every block takes its columns through all operations.

Operations treat each column alone, so blocks need not wait for each other, whatever depends on what; and what one
operation wrote is still in the cache when the next reads it.
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

BLOCK = 256
"""Columns per block."""


class TritonExecutor:
    """Vectors stand in a program as their addresses."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.element = getattr(tl, str(dtype).removeprefix("torch."))

    def handle(self, vector: Tensor) -> float:
        assert vector.is_contiguous()
        # Addresses have at most 48 bits: as doubles they are exact, and one table takes them and the numbers.
        return float(vector.data_ptr())

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        if not programs:
            return []
        fields = np.concatenate([np.array(program, dtype=np.float64) for program, _ in programs])
        fields = fields.reshape(-1, FIELDS)
        # Not blocking: the CPU goes on while the GPU is busy. The copies have left the arrays when the calls return.
        vectors = torch.from_numpy(fields[:, :2].astype(np.int64)).to(self.device, non_blocking=True)
        numbers = torch.from_numpy(fields[:, 2:].copy()).to(self.device, non_blocking=True)
        runs: list[Callable[[], None]] = []
        at = 0
        for program, width in programs:
            count = len(program) // FIELDS
            runs.append(partial(self._run, vectors[at : at + count], numbers[at : at + count], width))
            at += count
        return runs

    def _run(self, vectors: Tensor, numbers: Tensor, width: int) -> None:
        grid = (triton.cdiv(width, BLOCK),)
        with torch.cuda.device(self.device):
            _interpret[grid](vectors, numbers, len(vectors), width, element=self.element, block=BLOCK)


@triton.jit
def _interpret(vectors, numbers, count, width, element: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = columns < width
    for k in range(count):
        y = tl.load(vectors + 2 * k).to(tl.pointer_type(element)) + columns
        v = tl.load(vectors + 2 * k + 1).to(tl.pointer_type(element)) + columns
        keep, number = tl.load(numbers + 2 * k), tl.load(numbers + 2 * k + 1)
        factor = number.to(element)
        other = tl.load(v, inside)
        if keep == 0.0:
            tl.store(y, factor * other, inside)
        else:
            old = tl.load(y, inside)
            if keep == 1.0:
                tl.store(y, old + factor * other, inside)
            elif keep + number == 1.0:
                tl.store(y, old + factor * (other - old), inside)
            else:
                tl.store(y, keep.to(element) * old + factor * other, inside)
        # The next operation may read with another thread what this one wrote.
        tl.debug_barrier()
