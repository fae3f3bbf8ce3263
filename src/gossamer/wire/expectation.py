"""How far away a sender expects its receivers to be, from how far away they were."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gossamer.wire.codec import Codec, num_blocks

DECAY = 0.85
"""An earlier distance counts less by this factor at each exchange. Neighbours meet irregularly: after a short interval
they are close, after the next one not."""

MEAN_DECAY, MEAN_HEADROOM = 0.6, 0.5
"""Means are regular, and their distances are those of the farthest member: earlier ones count less, and half of the
headroom is enough."""

GROWTH = 4.0
"""By which the expected distance grows where a receiver was too far away."""


class Expectation:
    """The largest distance of late, in each block."""

    def __init__(self, codec: Codec, decay: float = DECAY, headroom: float = 1.0) -> None:
        """``headroom``: as a part of the codec's."""
        self.codec, self.decay, self.headroom = codec, decay, headroom * codec.headroom
        self.distances: Tensor | None = None

    def reach(self, vector: Tensor) -> Tensor | None:
        """Return the reach for ``vector``; None: nothing is known."""
        codec = self.codec
        if self.distances is None or len(self.distances) != num_blocks(len(vector), codec.block):
            # A guess counts as a distance that was seen: workers that start alike will not stay so.
            first = codec.first_reach(vector)
            self.distances = None if first is None else first / self.headroom
        return None if self.distances is None else self.distances * self.headroom

    def observe(self, seen: Tensor, growth: float = math.inf) -> None:
        """Learn the distances that were seen, NaN or inf where none was; distances grow at most by ``growth``."""
        known = self.distances
        if known is None:
            self.distances = torch.where(seen < torch.inf, seen, 0.0)
        else:
            learned = torch.maximum(torch.minimum(seen, growth * known), self.decay * known)
            self.distances = torch.where(seen < torch.inf, learned, known)

    def grow(self, blocks: Tensor, vector: Tensor, factor: float = GROWTH) -> None:
        """Expect more in ``blocks`` of ``vector``, a mask, where a receiver was farther away, nobody knows how far."""
        if self.distances is not None:
            # At least some part of the model's own size: a block that was zero would have to grow from nothing.
            rms = float(torch.linalg.vector_norm(vector.float())) / len(vector) ** 0.5
            grown = (self.distances * factor).clamp_(min=rms / 1024 if rms < math.inf else 0.0)
            self.distances = torch.where(blocks, grown, self.distances)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: a tensor, if anything is known."""
        return {} if self.distances is None else {"distances": self.distances}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.distances = state.get("distances")
