"""How far away a sender expects its receivers to be, from how far away they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.wire.codec import Codec, num_blocks

DECAY = 0.8
"""An earlier distance counts less by this factor at each observation."""

GROWTH = 4.0
"""By which the expected distance grows where a receiver was too far away."""


class Expectation:
    """The largest distance of late, in each block."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.distances: Tensor | None = None

    def reach(self, vector: Tensor) -> Tensor | None:
        """Return the reach for ``vector``; None: nothing is known."""
        codec = self.codec
        if self.distances is None or len(self.distances) != num_blocks(len(vector), codec.block):
            # A guess counts as a distance that was seen: workers that start alike will not stay so.
            first = codec.first_reach(vector)
            self.distances = None if first is None else first / codec.headroom
        return None if self.distances is None else self.distances * codec.headroom

    def observe(self, seen: Tensor) -> None:
        """Learn the distances that were seen; NaN or inf where none was."""
        seen = torch.where(seen < torch.inf, seen, 0.0)
        self.distances = seen if self.distances is None else torch.maximum(seen, DECAY * self.distances)

    def grow(self, too_far: Tensor, vector: Tensor) -> None:
        """Expect more in the blocks of ``vector`` where a receiver was too far away, and nobody knows how far."""
        if self.distances is not None:
            # At least some part of the model's own size: a block that was zero would have to grow from nothing.
            rms = float(torch.linalg.vector_norm(vector.float())) / len(vector) ** 0.5
            grown = (self.distances * (GROWTH / DECAY)).clamp_(min=rms / 1024 if rms < float("inf") else 0.0)
            self.distances = torch.where(too_far, grown, self.distances)

    def raise_to(self, other: Expectation) -> None:
        """Expect at least the distances that ``other`` expects."""
        own, theirs = self.distances, other.distances
        if theirs is not None:
            known = own is not None and len(own) == len(theirs)
            self.distances = torch.maximum(own, theirs) if known and own is not None else theirs

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: a tensor, if anything is known."""
        return {} if self.distances is None else {"distances": self.distances}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.distances = state.get("distances")
