"""What a loop of one's own logs (``Swarm.log``), kept until the status thread reads it.

Tensors on a GPU are read there too, on the stream on which they were computed: the loop never waits for the GPU.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.runs.status import WorkerStatus

MAX_PENDING = 10_000
"""Calls of ``log`` that are kept; the status thread reads them twice a second."""


@dataclass(frozen=True)
class _Entry:
    values: Mapping[str, float | Tensor]
    of_average: bool
    stream: Any
    """The CUDA stream of the loop if a value is on a GPU, else None."""


class LoopLog:
    def __init__(self) -> None:
        self._pending: deque[_Entry] = deque(maxlen=MAX_PENDING)

    def add(self, values: Mapping[str, float | Tensor], of_average: bool) -> None:
        """Take figures. Called by the loop, in any thread."""
        stream = None
        for value in values.values():
            if isinstance(value, Tensor) and value.device.type == "cuda":
                stream = torch.cuda.current_stream(value.device)
        self._pending.append(_Entry(values, of_average, stream))

    def update(self, status: WorkerStatus) -> None:
        """Move everything logged so far into the status."""
        entries = [self._pending.popleft() for _ in range(len(self._pending))]
        for entry, values in zip(entries, _numbers(entries), strict=True):
            for name, value in values.items():
                finite = value if math.isfinite(value) else None
                if name not in ("loss", "accuracy"):
                    status.logged[name] = finite
                elif entry.of_average:
                    setattr(status, name, finite)
                elif name == "accuracy":
                    status.own_accuracy = finite
                elif finite is not None:
                    status.loss_sum, status.loss_count = status.loss_sum + value, status.loss_count + 1
            if entry.of_average and not values.keys().isdisjoint(("loss", "accuracy")):
                status.num_evaluations += 1


def _numbers(entries: list[_Entry]) -> list[dict[str, float]]:
    """Read all tensors, with one copy from the GPU per stream."""
    by_stream: dict[Any, list[Tensor]] = {}
    for entry in entries:
        tensors = [value for value in entry.values.values() if isinstance(value, Tensor)]
        by_stream.setdefault(entry.stream, []).extend(tensors)
    read = {}
    for stream, tensors in by_stream.items():
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            read[stream] = iter(torch.stack(tensors).tolist() if tensors else [])
    return [
        {name: next(read[entry.stream]) if isinstance(value, Tensor) else value for name, value in entry.values.items()}
        for entry in entries
    ]
