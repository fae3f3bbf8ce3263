"""How many ranks of a replica hold each part of the vector, so that sums over ranks count each element once."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from gossamer.vectors.flat import Flat, is_sharded
from gossamer.vectors.vector_math import distance


def num_copies(parameter: Any, ranks: int) -> int:
    """Return how many of the ``ranks`` of a replica hold the same part of this parameter."""
    if not is_sharded(parameter):
        return ranks
    placed = zip(parameter.device_mesh.mesh.shape, parameter.placements, strict=True)
    return ranks // math.prod(size for size, placement in placed if not placement.is_replicate())


class Copies:
    """For each part of a rank's vector, how many ranks of the replica hold it."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.spans: list[tuple[int, int, int]] = []
        """Start, end and number of copies, for neighbouring parts together."""
        for part in Flat.of_parameters(model).parts:
            start, copies = part.start, num_copies(named[part.name], ranks)
            if self.spans and self.spans[-1][2] == copies:
                start = self.spans.pop()[0]
            self.spans.append((start, part.end, copies))

    def squared_distance(self, one: Tensor, other: Tensor) -> float:
        """Return this rank's part of the squared distance of two vectors: summed over ranks, it is the whole one.

        The vectors may hold several of the model's size, one behind the other.
        """
        size = self.spans[-1][1]
        if len(one) % size:
            # A message in a layout of the method's own.
            return distance(one, other) ** 2 / min(copies for _, _, copies in self.spans)
        return sum(
            distance(one[offset + start : offset + end], other[offset + start : offset + end]) ** 2 / copies
            for offset in range(0, len(one), size)
            for start, end, copies in self.spans
        )
