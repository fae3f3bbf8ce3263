"""Small operations on vectors of one length, written down one after the other, and how they are executed.

A program is a flat list with four entries per operation: its kind, what stands for the vector ``y`` that changes, what
stands for the vector ``v`` that is read, and a number. On a CPU the operations run one by one, those on shorter vectors
through BLAS, whose calls take half as long as torch's. On a GPU calls take too long for that: there a whole program is
one kernel (``columns``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from scipy.linalg import get_blas_funcs
from torch import Tensor

COPY, ADD, SCALE, LERP = 0.0, 1.0, 2.0, 3.0
"""``y = v``; ``y += number · v``; ``y *= number``; ``y += number · (v − y)``. Floats, as everything in a GPU's program:
a list of nothing else becomes an array in three fifths of the time."""

FIELDS = 4
"""Entries per operation."""

Program = list[Any]


class Executor(Protocol):
    def handle(self, vector: Tensor) -> Any:
        """What stands for this vector in a program."""

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        """For each program, with the length of its vectors: what runs it."""


def executor(dtype: torch.dtype, device: torch.device) -> Executor:
    """The fastest that this device and this installation have."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from gossamer.virtual.columns import ByColumns

        return ByColumns(dtype, device)
    if device.type == "cpu" and dtype in (torch.float32, torch.float64):
        return ByBlas(dtype)
    return ByTorch()


class ByTorch:
    """Vectors stand for themselves."""

    def handle(self, vector: Tensor) -> Any:
        return vector

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        return [partial(self.run, program) for program, _ in programs]

    def run(self, program: Program) -> None:
        for kind, y, v, number in operations(program):
            if kind == ADD:
                y.add_(v, alpha=number)
            elif kind == COPY:
                y.copy_(v)
            elif kind == SCALE:
                y.mul_(number)
            else:
                y.lerp_(v, number)


class ByBlas:
    """Vectors stand in a program as arrays, long ones as tensors: with those, torch works on all cores."""

    LONG = 1 << 15
    """Elements from which on torch does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.axpy, self.scal = get_blas_funcs(("axpy", "scal"), dtype=str(dtype).removeprefix("torch."))
        self.torch = ByTorch()

    def handle(self, vector: Tensor) -> Any:
        return vector if self._is_long(len(vector)) else vector.numpy()

    def _is_long(self, width: int) -> bool:
        return width >= self.LONG or width == 0

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        return [partial(self.torch.run if self._is_long(width) else self._run, program) for program, width in programs]

    def _run(self, program: Program) -> None:
        axpy, scal = self.axpy, self.scal
        for kind, y, v, number in operations(program):
            if kind == ADD:
                axpy(v, y, a=number)
            elif kind == COPY:
                y[:] = v
            elif kind == SCALE:
                scal(number, y)
            else:
                torch.from_numpy(y).lerp_(torch.from_numpy(v), number)


def operations(program: Program) -> Iterator[tuple[Any, ...]]:
    """The operations of a program, one by one."""
    fields = iter(program)
    return zip(fields, fields, fields, fields, strict=True)
