"""What a compressor is, and the ratio that some of them are set with."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from gossamer.effects import Effect
from gossamer.errors import InputError

if TYPE_CHECKING:
    from gossamer.worker import Worker

Averaging = Generator[Effect, Any, tuple[Tensor, Tensor]]
"""Yields ``Mean`` and ``Gather`` effects, is sent their answers, and returns ``(mean, kept)``."""


class Compressor(Protocol):
    """Averages a flat vector over all workers, keeping only a part of it.

    A compressor holds settings only: what it has to remember is in the worker.
    """

    @property
    def name(self) -> str: ...

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        """Ask for the mean over all workers of what the compression keeps of ``vector``.

        Returns ``(mean, kept)``, both fresh and dense. ``mean`` is bit-identical on all workers. ``kept`` is
        this worker's own share of it: ``mean`` is the mean over the workers of ``kept``, up to rounding, and
        ``vector − kept`` is what error feedback remembers.

        ``vector`` is only read, and must not change until the generator has returned. Numbers that are not
        finite come out as such, in the mean of all workers.
        """

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        """How many bytes one worker puts into its messages per averaging."""


def check_ratio(ratio: float) -> None:
    """Refuse a compression ratio that is not a finite number of at least 1."""
    if not (math.isfinite(ratio) and ratio >= 1):
        raise InputError(f"compression ratio {ratio} cannot be used: expected a finite number of at least 1")


def num_kept(num_elements: int, ratio: float) -> int:
    """How many elements a sparse compressor keeps: ``ceil(n / ratio)``, at least one."""
    return max(1, math.ceil(num_elements / ratio))
