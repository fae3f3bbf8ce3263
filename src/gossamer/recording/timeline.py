"""How the workers spent their time, in a fixed number of bins that widen as the run goes on."""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

KINDS = ("compute", "step", "wait", "exchange", "dead")
"""What a worker can be doing. The first three follow each other; it exchanges beside them."""

COMPUTE, STEP, WAIT, EXCHANGE, DEAD = range(len(KINDS))

MOST_CELLS = 1 << 16
"""Bins of all workers together, for one kind."""

MOST_BINS, LEAST_BINS = 512, 16
FINEST = 2.0**-20
"""Width of the first bins. It doubles when they are full, so that widths of any two recordings are nested."""


class Timeline:
    """The share of each bin that each worker spent on each kind of thing."""

    def __init__(self, num_workers: int) -> None:
        self.bins = int(np.clip(1 << int(math.log2(MOST_CELLS / max(1, num_workers))), LEAST_BINS, MOST_BINS))
        self.width = FINEST
        self.shares = np.zeros((len(KINDS), num_workers, self.bins))

    def add(self, kind: int, workers: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Spans of one kind: of which worker (by its row), from when to when."""
        if not len(starts):
            return
        self._reach(float(ends.max()))
        # A span is all time from its start on, less all time from its end on; summing up gives what is in each bin.
        rises = np.zeros(self.shares.shape[1] * (self.bins + 2))
        for times, sign in ((starts, 1.0), (ends, -1.0)):
            at = times / self.width
            whole = np.minimum(at.astype(np.int64), self.bins)
            part = np.minimum(at - whole, 1.0)
            place = workers * (self.bins + 2) + whole
            rises += sign * np.bincount(place, 1.0 - part, minlength=len(rises))
            rises += sign * np.bincount(place + 1, part, minlength=len(rises))
        self.shares[kind] += rises.reshape(-1, self.bins + 2).cumsum(axis=1)[:, : self.bins]

    def _reach(self, time: float) -> None:
        """Widen the bins until ``time`` is in one of them."""
        while time > self.width * self.bins:
            halves = self.shares.reshape(*self.shares.shape[:2], self.bins // 2, 2).mean(axis=3)
            self.shares = np.concatenate([halves, np.zeros_like(halves)], axis=2)
            self.width *= 2

    def totals(self) -> np.ndarray:
        """Time by kind and worker."""
        return self.shares.sum(axis=2) * self.width

    def document(self, until: float) -> dict[str, Any]:
        """The bins up to ``until`` as plain data: shares in 255ths, one byte each, worker by worker, in base64."""
        used = min(self.bins, max(1, math.ceil(until / self.width)))
        levels = np.clip(np.rint(self.shares[:, :, :used] * 255), 0, 255).astype(np.uint8)
        packed = {name: base64.b64encode(levels[kind].tobytes()).decode() for kind, name in enumerate(KINDS)}
        return {"width": self.width, "bins": used, "shares": packed}
