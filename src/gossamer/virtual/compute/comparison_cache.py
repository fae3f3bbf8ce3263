"""What the runs of one comparison share: the task, its data on the device, captured graphs.

A comparison trains the same model with several methods or seeds, one run after the other. Reading the data, copying it
to the device and capturing graphs (with ``compiled`` also the compiler's minutes) need be done once. The newest of each
is kept. Before another task is built, all of the last one is dropped. The graphs of the last run stay until others are
captured, beside the vectors of the next run. The results are those of runs without a cache, to the bit.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from gossamer import tasks
from gossamer.tasks import Task, TaskConfig

T = TypeVar("T")


class Captured(Protocol):
    """Graphs that were captured for one run."""

    draws_random_numbers: bool
    """Capturing them drew random numbers, as dropout does: a run that finds them captured would draw others."""


C = TypeVar("C", bound=Captured)


class _Newest(Generic[T]):
    """Keeps what was made last, under its key. What was there before is dropped before something else is made."""

    def __init__(self) -> None:
        self.key: Hashable = None
        self.value: T | None = None

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if self.value is None or key != self.key:
            self.drop()
            self.value = make()
            self.key = key
        return self.value

    def drop(self) -> None:
        self.key, self.value = None, None


class ComparisonCache:
    def __init__(self) -> None:
        self._task: _Newest[Task] = _Newest()
        self._data: _Newest[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = _Newest()
        self._graphs: _Newest[Captured] = _Newest()

    def build_task(self, spec: str, *, workers: int, seed: int, config: TaskConfig | None = None) -> Task:
        """Do what ``tasks.build`` does, unless the newest task is the one that it would build."""
        differs = () if spec in tasks.SAME_FOR_ALL else (workers, seed)

        def build() -> Task:
            # Their keys and contents hold the last task.
            self._data.drop()
            self._graphs.drop()
            return tasks.build(spec, workers=workers, seed=seed, config=config)

        return self._task.get((spec, config, differs), build)

    def device_data(self, task: Task, device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the training and the test data of ``task`` on ``device``."""

        def copy() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            return tuple(part.to(device) for part in task.train), tuple(part.to(device) for part in task.test)

        return self._data.get((task, device), copy)

    def graphs(self, key: Hashable, capture: Callable[[], C]) -> C:
        """Return the graphs that were captured under ``key``, or capture them.

        Args:
            key: everything that the graphs depend on, except what is copied into their memory before each replay.
        """
        if self._graphs.value is not None and self._graphs.value.draws_random_numbers:
            self._graphs.drop()
        return cast("C", self._graphs.get(key, capture))


def model_key(model: nn.Module, replaced: list[Tensor], seed: int) -> Hashable:
    """Return a key that is equal for models that compute the same once the tensors ``replaced`` are.

    It holds everything else of a model: its structure, frozen parameters, counters, constants. A model that cannot be
    pickled has the key of its seed, which determines it.
    """
    stream = io.BytesIO()
    try:
        _DescribingPickler(stream, replaced).dump(model)
    except Exception:  # whatever the user's classes raise
        return seed
    return hashlib.sha256(stream.getvalue()).digest()


class _DescribingPickler(pickle.Pickler):
    """Pickles tensors by value, and some of them by shape and dtype only."""

    def __init__(self, stream: io.BytesIO, replaced: list[Tensor]) -> None:
        super().__init__(stream)
        self.replaced = {id(tensor) for tensor in replaced}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        description: list[Any] = [tuple(obj.shape), str(obj.dtype), obj.requires_grad]
        if id(obj) not in self.replaced:
            # Bytes, because numpy has not all of torch's dtypes.
            description.append(obj.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return list, (description,)
