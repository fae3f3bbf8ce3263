"""How far apart workers are expected to be, from how far apart they were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gossamer.wire.codec import Codec, num_blocks

DECAY = 0.8
"""The largest distance of earlier exchanges counts less by this factor at each exchange."""

MAX_FAILURES = 3
"""After more messages in a row that could not be decoded, the next is sent for any receiver."""


class Expectation:
    """How far away a sender expects its receivers to be: as far as they were of late, with headroom."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.distances: Tensor | None = None
        """The largest distance of late, per block; None: nothing is known."""
        self.failures = 0
        """Messages in a row that receivers could not decode."""

    def reach(self, vector: Tensor) -> Tensor | None:
        """Return the reach for ``vector``; None: send for any receiver."""
        codec = self.codec
        if self.failures > MAX_FAILURES:
            return None
        # The headroom once, and in each repetition once more than in the last: 4, 64, 4,096 times as far.
        growth = codec.headroom ** (self.failures * (self.failures + 1) // 2)
        if self.distances is None or len(self.distances) != num_blocks(len(vector), codec.block):
            first = codec.first_reach(vector)
            return None if first is None else first * growth
        return self.distances * (codec.headroom * growth)

    def observe(self, distances: Tensor) -> None:
        """Receivers were this far away."""
        known = self.distances
        if known is not None and len(known) == len(distances):
            distances = torch.maximum(distances, DECAY * known)
        self.distances = distances
        self.failures = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: a tensor, if anything is known, and a count."""
        known = {} if self.distances is None else {"distances": self.distances}
        return {"failures": self.failures, **known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.failures, self.distances = state["failures"], state.get("distances")
