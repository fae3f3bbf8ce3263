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

from gossamer.virtual.programs import ADD, COPY, FIELDS, SCALE, Program

BLOCK = 256
"""Columns per block."""

_COPY, _ADD, _SCALE = tl.constexpr(int(COPY)), tl.constexpr(int(ADD)), tl.constexpr(int(SCALE))


class ByColumns:
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
        words = torch.from_numpy(fields[:, :3].astype(np.int64)).to(self.device, non_blocking=True)
        numbers = torch.from_numpy(fields[:, 3].copy()).to(self.device, non_blocking=True)
        runs: list[Callable[[], None]] = []
        at = 0
        for program, width in programs:
            count = len(program) // FIELDS
            runs.append(partial(self._run, words[at : at + count], numbers[at : at + count], width))
            at += count
        return runs

    def _run(self, words: Tensor, numbers: Tensor, width: int) -> None:
        grid = (triton.cdiv(width, BLOCK),)
        with torch.cuda.device(self.device):
            _interpret[grid](words, numbers, len(words), width, element=self.element, block=BLOCK)


@triton.jit
def _interpret(words, numbers, count, width, element: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = columns < width
    for k in range(count):
        kind = tl.load(words + 3 * k)
        y = tl.load(words + 3 * k + 1).to(tl.pointer_type(element)) + columns
        v = tl.load(words + 3 * k + 2).to(tl.pointer_type(element)) + columns
        number = tl.load(numbers + k).to(element)
        other = tl.load(v, inside)
        if kind == _COPY:
            tl.store(y, other, inside)
        else:
            old = tl.load(y, inside)
            if kind == _ADD:
                tl.store(y, old + number * other, inside)
            elif kind == _SCALE:
                tl.store(y, old * number, inside)
            else:
                tl.store(y, old + number * (other - old), inside)
        # The next operation may read with another thread what this one wrote.
        tl.debug_barrier()
