"""A user's ``DataLoader`` taken apart: what it draws its batches from, and a copy that draws them from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset

from gossamer.errors import InputError


class Source:
    """Where a loader's batches come from: single examples that it puts together, or batches of its own sampler."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.stream = isinstance(loader.dataset, IterableDataset)
        self.indices: Sequence[Any] = loader.dataset.indices if isinstance(loader.dataset, Subset) else ()
        """Of a ``Subset``: which examples it has."""
        # A batch sampler of the user, or a loader without batches, yields items that cannot be divided.
        self.divisible = loader.batch_size is not None and loader.batch_sampler is not None
        self.batch_size = loader.batch_size if self.divisible and loader.batch_size else 1
        self.drop_last = bool(loader.drop_last) if self.divisible else False
        self.batched = loader.batch_sampler is not None
        self.sampler: Iterable[Any] = loader.sampler if self.divisible or not self.batched else loader.batch_sampler  # type: ignore[assignment]

    @property
    def replicas(self) -> int:
        """Return among how many workers the loader's own sampler deals; 1 if it does not."""
        inner = getattr(self.sampler, "sampler", None)
        return max(int(getattr(each, "num_replicas", None) or 1) for each in (self.sampler, inner))

    @property
    def size(self) -> int:
        """Return how many items an epoch has."""
        try:
            return len(self.sampler)  # type: ignore[arg-type]
        except TypeError:
            kind = type(self.sampler).__name__
            raise InputError(f"{kind} has no length, so it cannot be dealt: give it a __len__") from None


class ReplacedSampler(Sampler[Any]):
    """A sampler, or a batch sampler, of items that are set before each pass."""

    def __init__(self) -> None:
        self.items: Iterable[Any] = ()
        self.length = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return self.length


def settings(loader: DataLoader[Any], source: Source, sampler: Sampler[Any]) -> dict[str, Any]:
    """Return the arguments that create the same loader with another sampler. A stream keeps its batch size instead."""
    if source.stream:
        drawn: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif source.batched:
        drawn = {"batch_sampler": sampler}
    else:
        drawn = {"batch_size": None, "sampler": sampler}
    device = {"pin_memory_device": loader.pin_memory_device} if loader.pin_memory_device else {}
    return {
        **drawn,
        **device,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
        "persistent_workers": loader.persistent_workers,
        "in_order": loader.in_order,
    }


def is_plain(loader: object) -> bool:
    """Return whether this is a loader that can be created again: torch's own, or one that only differs in settings."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
