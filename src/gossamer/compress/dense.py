"""No compression: the whole vector is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from gossamer.compress.compressor import Averaging
from gossamer.effects import Mean

if TYPE_CHECKING:
    from gossamer.worker import Worker


@dataclass(frozen=True)
class Dense:
    """All-reduce of the whole vector. It has no ratio."""

    name: ClassVar[str] = "none"

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        mean = yield Mean(vector, round, topic)
        return mean.clone(), vector.clone()

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return num_elements * itemsize
