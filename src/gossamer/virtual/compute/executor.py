"""Programs of small vector operations, and the executors that run them.

An operation is ``y = keep · y + factor · v`` on vectors of one length. A *program* is a flat list with four entries
per operation: the handles of ``y`` and ``v``, then ``keep`` and ``factor``. Where ``keep`` is 0, the old content of
``y`` is not read. Where ``keep + factor`` is 1, the operation is computed as ``y += factor · (v − y)``, so that equal
vectors stay equal to the bit.

On a CPU, operations run one by one: short vectors through BLAS, whose calls take half as long as torch's, long ones
through torch, which uses all cores. On a GPU a launch per operation would take too long, so a whole program is one
Triton kernel (``triton_executor``).
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
"""Operations in the order of their execution, ``FIELDS`` entries each. Flat, because many small tuples would keep
Python's garbage collector busy."""


class Executor(Protocol):
    def handle(self, vector: Tensor) -> Any:
        """Return what stands for ``vector`` in a program."""

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        """Return a function for each pair of a program and the length of its vectors; calling it runs the program."""


def make_executor(dtype: torch.dtype, device: torch.device) -> Executor:
    """Return the fastest executor that works for this device and installation."""
    if triton_works(device):
        from gossamer.virtual.compute.triton_executor import TritonExecutor

        return TritonExecutor(dtype, device)
    if device.type == "cpu" and dtype in (torch.float32, torch.float64):
        return BlasExecutor(dtype)
    return TorchExecutor()


@cache
def triton_works(device: torch.device) -> bool:
    """Whether ``device`` is a GPU and Triton compiles for it. Triton may be missing, or the C compiler it needs."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    try:
        from gossamer.virtual.compute.triton_executor import TritonExecutor

        vector, executor = torch.ones(1, device=device), TritonExecutor(torch.float32, device)
        for run in executor.load([([executor.handle(vector)] * 2 + [0.0, 1.0], 1)]):
            run()
    except Exception as error:  # the compiler, Triton and Python each raise their own
        warnings.warn(f"simulating on the GPU will take longer: Triton does not work here ({error})", stacklevel=2)
        return False
    return True


class TorchExecutor:
    """Runs operations one by one with torch. The handle of a vector is the tensor itself."""

    def handle(self, vector: Tensor) -> Any:
        return vector

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        return [partial(self.run, program) for program, _ in programs]

    def run(self, program: Program) -> None:
        for y, v, keep, factor in operations(program):
            if keep == 1.0:
                y.add_(v, alpha=factor)
            elif keep == 0.0:
                if y is not v:
                    y.copy_(v)
                if factor != 1.0:
                    y.mul_(factor)
            elif keep + factor == 1.0:
                y.lerp_(v, factor)
            else:
                y.mul_(keep).add_(v, alpha=factor)


class BlasExecutor:
    """Runs operations one by one, on short vectors with BLAS (handles are arrays), on long ones with torch."""

    MIN_TORCH_ELEMENTS = 1 << 15
    """Length from which on torch, with all cores, is faster than BLAS with one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.axpy, self.scal = get_blas_funcs(("axpy", "scal"), dtype=str(dtype).removeprefix("torch."))
        self.torch = TorchExecutor()

    def handle(self, vector: Tensor) -> Any:
        return vector if self._uses_torch(len(vector)) else vector.numpy()

    def _uses_torch(self, width: int) -> bool:
        return width >= self.MIN_TORCH_ELEMENTS or width == 0

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        return [
            partial(self.torch.run, program) if self._uses_torch(width) else partial(self._run, program, width)
            for program, width in programs
        ]

    def _run(self, program: Program, width: int) -> None:
        axpy, scal = self.axpy, self.scal
        for y, v, keep, factor in operations(program):
            if keep == 1.0:
                axpy(v, y, width, factor)
            elif keep == 0.0:
                if y is not v:
                    y[:] = v
                if factor != 1.0:
                    scal(factor, y)
            elif keep + factor == 1.0:
                torch.from_numpy(y).lerp_(torch.from_numpy(v), factor)
            else:
                scal(keep, y)
                axpy(v, y, width, factor)


def operations(program: Program) -> Iterator[tuple[Any, ...]]:
    """Iterate over the operations of a program as tuples ``(y, v, keep, factor)``."""
    fields = iter(program)
    return zip(fields, fields, fields, fields, strict=True)
