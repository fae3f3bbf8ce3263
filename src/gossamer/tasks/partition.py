"""Dealing the samples to the workers, and the mini-batches of each worker."""

from __future__ import annotations

import math

import numpy as np

from gossamer.errors import InputError, unknown
from gossamer.seeds import stream
from gossamer.tasks.task import Task

DEFAULT_ALPHA = 0.5
MAX_ALPHA = 1e6
"""Above this the Dirichlet draw is uniform to six digits, and far above it overflows."""


def partition(spec: str, labels: np.ndarray | None, num_samples: int, workers: int, seed: int) -> list[np.ndarray]:
    """Deal samples 0 … num_samples − 1 to the workers. Return the indices of each worker's samples, at least one.

    ``spec`` is one of:

    - ``iid``: random parts whose sizes differ by at most one.
    - ``dirichlet:α``: each class is dealt in proportions drawn from Dirichlet(α, …, α). The smaller α, the fewer
      workers share a class. Sizes differ. ``dirichlet`` alone means α = 0.5.
    - ``by-class``: the samples are sorted by class and cut into contiguous parts whose sizes differ by at most one, so
      a worker has one class or a few.
    """
    if workers < 1:
        raise InputError(f"workers is {workers}: expected at least 1.")
    if num_samples < workers:
        raise InputError(
            f"{num_samples} train samples cannot be dealt to {workers} workers, each needs at least one: "
            "use fewer workers or more data."
        )
    kind, colon, parameter = spec.partition(":")
    if kind not in ("iid", "dirichlet", "by-class") or (colon and kind != "dirichlet"):
        raise unknown("partition", spec, ("iid", "dirichlet:ALPHA", "by-class"))
    rng = stream(seed, "partition")
    shuffled = rng.permutation(num_samples)
    if kind == "iid":
        return np.array_split(shuffled, workers)

    if labels is None:
        raise InputError(f"partition {spec!r} needs classes, but this task has no labels: use iid.")
    if len(labels) != num_samples:
        raise InputError(f"{len(labels)} labels for {num_samples} train samples: expected one per sample.")
    # A stable sort of the shuffled samples keeps the order within a class random.
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    if kind == "by-class":
        return np.array_split(by_class, workers)
    alpha = _parse_alpha(spec, parameter if colon else str(DEFAULT_ALPHA))
    in_order = labels[by_class]
    first_of_class = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    return _deal_dirichlet(np.split(by_class, first_of_class), alpha, workers, rng)


def _parse_alpha(spec: str, text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not 0 < alpha <= MAX_ALPHA:
        raise InputError(
            f"partition {spec!r}: expected dirichlet:ALPHA with a number 0 < ALPHA <= {MAX_ALPHA:.0f}, "
            "such as dirichlet:0.1."
        )
    return alpha


def _deal_dirichlet(
    classes: list[np.ndarray], alpha: float, workers: int, rng: np.random.Generator
) -> list[np.ndarray]:
    chunks: list[list[np.ndarray]] = [[] for _ in range(workers)]
    for samples in classes:
        shares = rng.dirichlet(np.full(workers, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(int)
        for worker, piece in enumerate(np.split(samples, cuts)):
            chunks[worker].append(piece)
    parts = [np.concatenate(piece) for piece in chunks]
    # A small alpha leaves some workers without samples: each takes one from the worker that has most.
    for worker, part in enumerate(parts):
        if len(part) == 0:
            richest = max(range(workers), key=lambda rank: len(parts[rank]))
            parts[worker], parts[richest] = parts[richest][-1:], parts[richest][:-1]
    return parts


class Batches:
    """The mini-batches of one worker, the same for real and virtual workers.

    The worker goes through its samples in epochs, each a new permutation. A mini-batch that reaches the end of an epoch
    continues in the next one, so all have exactly ``batch`` samples, and a worker with fewer samples than that has some
    of them several times in one mini-batch. ``take`` gives any mini-batch at any time, which resuming a run needs: the
    permutations are drawn from (seed, rank, block), where a block consists of one or more epochs.
    """

    MIN_BLOCK = 1024
    """Minimum number of samples per block: to create a random stream takes as long as to shuffle a thousand samples."""

    def __init__(self, indices: np.ndarray, batch: int, seed: int, rank: int) -> None:
        if batch < 1:
            raise InputError(f"batch is {batch}: expected at least 1 sample per mini-batch.")
        if len(indices) == 0:
            raise InputError(f"worker {rank} has no samples: expected at least one.")
        self.indices, self.batch, self.seed, self.rank = indices, batch, seed, rank
        self._epochs_per_block = math.ceil(self.MIN_BLOCK / len(indices))
        self._block_size = self._epochs_per_block * len(indices)
        self._block, self._order = -1, indices
        self._first, self._last = 0, -1
        """First and last start, in samples, of the mini-batches that lie within this block."""

    def take(self, step: int) -> np.ndarray:
        """Return the sample indices of mini-batch number ``step``, counted from 0."""
        return self.view(step).copy()

    def view(self, step: int) -> np.ndarray:
        """Return what ``take`` returns without a copy. The caller must not write to it."""
        start = step * self.batch
        if self._first <= start <= self._last:
            offset = start - self._first
            return self._order[offset : offset + self.batch]
        block, offset = divmod(start, self._block_size)
        batch = self._samples(block)[offset : offset + self.batch]
        while len(batch) < self.batch:
            block += 1
            batch = np.concatenate([batch, self._samples(block)[: self.batch - len(batch)]])
        return batch

    def _samples(self, block: int) -> np.ndarray:
        """Return the samples in the order of the epochs of this block."""
        if block != self._block:
            epochs = np.tile(self.indices, (self._epochs_per_block, 1))
            if len(self.indices) > 1:
                epochs = stream(self.seed, "batches", self.rank, block).permuted(epochs, axis=1)
            self._order, self._block = epochs.ravel(), block
            self._first = block * self._block_size
            self._last = self._first + self._block_size - self.batch
        return self._order


def worker_batches(task: Task, spec: str, workers: int, batch: int, seed: int) -> list[Batches]:
    if task.own_data:
        parts = [np.array([rank]) for rank in range(workers)]
    else:
        parts = partition(spec, task.labels, len(task.train[0]), workers, seed)
    return [Batches(part, batch, seed, rank) for rank, part in enumerate(parts)]
