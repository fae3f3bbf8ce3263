"""Small operations on vectors of one length, written down one after the other, and how they are executed.

A program is a flat list with four entries per operation: its kind, what stands for the vector ``y`` that changes, what
stands for the vector ``v`` that is read, and a number. ``OneByOne`` lets torch do them in turn: on a CPU the call takes
no longer than the arithmetic on a few thousand numbers. On a GPU it takes much longer, so there a whole program is one
kernel (``columns``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

COPY, ADD, SCALE, LERP = range(4)
"""``y = v``; ``y += number · v``; ``y *= number``; ``y += number · (v − y)``."""

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
    return OneByOne()


class OneByOne:
    """Vectors stand for themselves; torch does one operation after the other."""

    def handle(self, vector: Tensor) -> Tensor:
        return vector

    def load(self, programs: list[tuple[Program, int]]) -> list[Callable[[], None]]:
        return [partial(run_one_by_one, program) for program, _ in programs]


def run_one_by_one(program: Program) -> None:
    fields = iter(program)
    for kind, y, v, number in zip(fields, fields, fields, fields, strict=True):
        if kind == ADD:
            y.add_(v, alpha=number)
        elif kind == COPY:
            y.copy_(v)
        elif kind == SCALE:
            y.mul_(number)
        else:
            y.lerp_(v, number)
