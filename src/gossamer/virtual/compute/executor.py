"""Small operations on vectors of one length, written down one after the other, and how they are executed.

An operation is ``y = keep · y + number · v``. A program is a flat list with four entries for each: what stands for the
vectors ``y`` and ``v``, and the two numbers. Where ``keep`` is 0, what was in ``y`` is not read; where the two make 1,
it is computed as ``y += number · (v − y)``, so that what is equal stays so. On a CPU the operations run one by one,
those on shorter vectors through BLAS, whose calls take half as long as torch's. On a GPU calls take too long for that:
there a whole program is one kernel (``columns``).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Protocol

import torch
from scipy.linalg import get_blas_funcs
from torch import Tensor

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
    if triton_works(device):
        from gossamer.virtual.compute.triton_executor import TritonExecutor

        return TritonExecutor(dtype, device)
    if device.type == "cpu" and dtype in (torch.float32, torch.float64):
        return BlasExecutor(dtype)
    return TorchExecutor()


@cache
def triton_works(device: torch.device) -> bool:
    """Whether this is a GPU and Triton makes kernels for it: it may be missing, or the C compiler that it needs."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    try:
        from gossamer.virtual.compute.triton_executor import TritonExecutor

        vector, columns = torch.ones(1, device=device), TritonExecutor(torch.float32, device)
        for run in columns.load([([columns.handle(vector)] * 2 + [0.0, 1.0], 1)]):
            run()
    except Exception as error:  # of the compiler's, of Triton's own, of Python's
        warnings.warn(f"simulating on the GPU will take longer: Triton does not work here ({error})", stacklevel=2)
        return False
    return True


class TorchExecutor:
    """Vectors stand for themselves."""

    def handle(self, vector: Tensor) -> Any:
        return vector

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        return [partial(self.run, program) for program, _ in programs]

    def run(self, program: Program) -> None:
        for y, v, keep, number in operations(program):
            if keep == 1.0:
                y.add_(v, alpha=number)
            elif keep == 0.0:
                if y is not v:
                    y.copy_(v)
                if number != 1.0:
                    y.mul_(number)
            elif keep + number == 1.0:
                y.lerp_(v, number)
            else:
                y.mul_(keep).add_(v, alpha=number)


class BlasExecutor:
    """Vectors stand in a program as arrays, long ones as tensors: with those, torch works on all cores."""

    LONG = 1 << 15
    """Elements from which on torch does."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.axpy, self.scal = get_blas_funcs(("axpy", "scal"), dtype=str(dtype).removeprefix("torch."))
        self.torch = TorchExecutor()

    def handle(self, vector: Tensor) -> Any:
        return vector if self._is_long(len(vector)) else vector.numpy()

    def _is_long(self, width: int) -> bool:
        return width >= self.LONG or width == 0

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        return [
            partial(self.torch.run, program) if self._is_long(width) else partial(self._run, program, width)
            for program, width in programs
        ]

    def _run(self, program: Program, width: int) -> None:
        axpy, scal = self.axpy, self.scal
        for y, v, keep, number in operations(program):
            if keep == 1.0:
                axpy(v, y, width, number)
            elif keep == 0.0:
                if y is not v:
                    y[:] = v
                if number != 1.0:
                    scal(number, y)
            elif keep + number == 1.0:
                torch.from_numpy(y).lerp_(torch.from_numpy(v), number)
            else:
                scal(keep, y)
                axpy(v, y, width, number)


def operations(program: Program) -> Iterator[tuple[Any, ...]]:
    """The operations of a program, one by one."""
    fields = iter(program)
    return zip(fields, fields, fields, fields, strict=True)
