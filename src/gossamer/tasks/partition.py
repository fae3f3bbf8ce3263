"""Who trains on what: the samples of each worker, and the order in which it takes them."""

from __future__ import annotations

import math

import numpy as np

from gossamer.errors import InputError, unknown
from gossamer.seeds import stream
from gossamer.tasks.task import Task

DEFAULT_ALPHA = 0.5
# Beyond this the Dirichlet draw is uniform to six digits, and much further it overflows.
MAX_ALPHA = 1e6


def partition(spec: str, labels: np.ndarray | None, num_samples: int, workers: int, seed: int) -> list[np.ndarray]:
    """Deal samples 0 … num_samples − 1 to the workers; every sample goes to exactly one, every worker gets one.

    spec
        `iid`: a random deal into parts whose sizes differ by at most one.
        `dirichlet:α`: each class is dealt in proportions drawn from Dirichlet(α, …, α); the smaller α, the
        fewer workers share a class. Sizes differ. `dirichlet` alone is α = 0.5.
        `by-class`: sorted by class and cut into contiguous parts, sizes differing by at most one, so that
        a worker sees one class or a few.
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
        raise InputError(f"partition {spec!r} needs classes, and this task has no labels: use iid.")
    if len(labels) != num_samples:
        raise InputError(f"{len(labels)} labels for {num_samples} train samples: expected one per sample.")
    # Sorting the shuffled samples keeps the order within a class random.
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    if kind == "by-class":
        return np.array_split(by_class, workers)
    alpha = parse_alpha(spec, parameter if colon else str(DEFAULT_ALPHA))
    in_order = labels[by_class]
    first_of_class = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    return deal_dirichlet(np.split(by_class, first_of_class), alpha, workers, rng)


def parse_alpha(spec: str, text: str) -> float:
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


def deal_dirichlet(classes: list[np.ndarray], alpha: float, workers: int, rng: np.random.Generator) -> list[np.ndarray]:
    chunks: list[list[np.ndarray]] = [[] for _ in range(workers)]
    for samples in classes:
        shares = rng.dirichlet(np.full(workers, alpha))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(int)
        for worker, piece in enumerate(np.split(samples, cuts)):
            chunks[worker].append(piece)
    parts = [np.concatenate(piece) for piece in chunks]
    # A small alpha leaves workers with nothing; each takes one sample from whoever has most.
    for worker, part in enumerate(parts):
        if len(part) == 0:
            richest = max(range(workers), key=lambda rank: len(parts[rank]))
            parts[worker], parts[richest] = parts[richest][-1:], parts[richest][:-1]
    return parts


class Batches:
    """The mini-batches of one worker, the same in every world.

    The worker goes through its samples in epochs, each a fresh permutation. A batch that reaches the end of an epoch
    goes on in the next, so every batch is exactly `batch` long, and a worker with fewer samples than that sees some of
    them several times in one batch. Any mini-batch can be asked for at any time, which is what resuming a run needs:
    the epochs are drawn from (seed, rank, block), several short ones at a time.
    """

    # Samples drawn at a time, at least: starting a random stream takes as long as shuffling a thousand samples.
    BLOCK = 1024

    def __init__(self, indices: np.ndarray, batch: int, seed: int, rank: int) -> None:
        if batch < 1:
            raise InputError(f"batch is {batch}: expected at least 1 sample per mini-batch.")
        if len(indices) == 0:
            raise InputError(f"worker {rank} has no samples: expected at least one.")
        self.indices = indices
        self.batch = batch
        self.seed = seed
        self.rank = rank
        self.steps_per_epoch = len(indices) / batch
        self._epochs_per_block = math.ceil(self.BLOCK / len(indices))
        self._block_size = self._epochs_per_block * len(indices)
        self._block, self._order = -1, indices
        self._first, self._last = 0, -1
        """Where batches begin that lie wholly in this block, counted in samples."""

    def take(self, step: int) -> np.ndarray:
        """The sample indices of mini-batch number `step`, counted from 0."""
        return self.look_at(step).copy()

    def look_at(self, step: int) -> np.ndarray:
        """What ``take`` gives, not to be written to."""
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
        """The samples in the order in which the epochs of this block go through them."""
        if block != self._block:
            epochs = np.tile(self.indices, (self._epochs_per_block, 1))
            if len(self.indices) > 1:
                epochs = stream(self.seed, "batches", self.rank, block).permuted(epochs, axis=1)
            self._order, self._block = epochs.ravel(), block
            self._first = block * self._block_size
            self._last = self._first + self._block_size - self.batch
        return self._order


def worker_batches(task: Task, spec: str, workers: int, batch: int, seed: int) -> list[Batches]:
    """The mini-batches of every worker, the same in every world."""
    if task.own_data:
        parts = [np.array([rank]) for rank in range(workers)]
    else:
        parts = partition(spec, task.labels, len(task.train[0]), workers, seed)
    return [Batches(part, batch, seed, rank) for rank, part in enumerate(parts)]
