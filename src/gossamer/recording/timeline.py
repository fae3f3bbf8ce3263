"""How the workers spent their time, in a fixed number of bins that widen as the run goes on."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

KINDS = ("compute", "step", "wait", "exchange", "dead")
"""Activities of a worker. The first three follow each other; exchanges run concurrently with them."""

COMPUTE, STEP, WAIT, EXCHANGE, DEAD = range(len(KINDS))

MAX_CELLS = 1 << 16
"""Bins of all workers together, for one kind."""

MAX_BINS, MIN_BINS = 512, 16
INITIAL_WIDTH = 2.0**-20
"""Width of the first bins. It doubles whenever they are full, so that the bins of two recordings are always nested."""


class Timeline:
    """The share of each bin that each worker spent on each kind of activity."""

    def __init__(self, num_workers: int) -> None:
        self.bins = int(np.clip(1 << int(math.log2(MAX_CELLS / max(1, num_workers))), MIN_BINS, MAX_BINS))
        self.width = INITIAL_WIDTH
        self.shares = np.zeros((len(KINDS), num_workers, self.bins))

    def add(self, kind: int, workers: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Add spans of one kind: the row of each span's worker, its start and its end."""
        if not len(starts):
            return
        self._widen_to(float(ends.max()))
        # A span is a step up at its start and a step down at its end; the cumulative sum fills the bins between them.
        steps = np.zeros(self.shares.shape[1] * (self.bins + 2))
        for times, sign in ((starts, 1.0), (ends, -1.0)):
            positions = times / self.width
            bins = np.minimum(positions.astype(np.int64), self.bins)
            fractions = np.minimum(positions - bins, 1.0)
            cells = workers * (self.bins + 2) + bins
            steps += sign * np.bincount(cells, 1.0 - fractions, minlength=len(steps))
            steps += sign * np.bincount(cells + 1, fractions, minlength=len(steps))
        self.shares[kind] += steps.reshape(-1, self.bins + 2).cumsum(axis=1)[:, : self.bins]

    def _widen_to(self, time: float) -> None:
        """Double the width of the bins until one of them contains ``time``."""
        while time > self.width * self.bins:
            halves = self.shares.reshape(*self.shares.shape[:2], self.bins // 2, 2).mean(axis=3)
            self.shares = np.concatenate([halves, np.zeros_like(halves)], axis=2)
            self.width *= 2

    def totals(self) -> np.ndarray:
        """Time by kind and worker."""
        return self.shares.sum(axis=2) * self.width

    def document(self, until: float) -> dict[str, Any]:
        """The bins up to ``until`` as plain data."""
        num_bins = min(self.bins, max(1, math.ceil(until / self.width)))
        levels = self.shares[:, :, :num_bins] * 255
        return {"width": self.width, "bins": num_bins, "shares": dict(zip(KINDS, map(pack, levels), strict=True))}


def pack(levels: np.ndarray) -> str:
    """Shares in 255ths (workers × bins) as base64, one byte each, worker by worker."""
    return base64.b64encode(np.rint(np.clip(levels, 0, 255)).astype(np.uint8).tobytes()).decode()


def unpack(recording: dict[str, Any], kind: str) -> np.ndarray:
    """Return the shares of one kind in a recording's document in 255ths: workers × bins."""
    shape = len(recording["workers"]), int(recording["timeline"]["bins"])
    return np.frombuffer(base64.b64decode(recording["timeline"]["shares"][kind]), np.uint8).reshape(shape)
