"""A worker of the world of any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.effects import Ticket
from gossamer.topology import Topology


class Peer:
    """A worker (a ``gossamer.worker.Worker``)."""

    def __init__(self, rank: int, topology: Topology, seed: int, dim: int, x: Tensor) -> None:
        self.rank, self.topology, self.seed, self.num_workers = rank, topology, seed, topology.workers
        self.rng = np.random.default_rng([seed, rank])
        self.step, self.time = 0, 0.0
        self.x, self.gradient = x, torch.zeros(dim, dtype=torch.float64)
        self.scalars: dict[str, float] = {}
        self.tickets: dict[str, Ticket] = {}
        self.vectors: dict[str, Tensor] = {}
        self.phase = "rest"  # then "computing", then "stepping"
        self.point = x.clone()
        self._snapshot = x.clone()
        self._optimizer_state: dict[str, Tensor] = {}

    def add_gradient(self, vector: Tensor) -> None:
        vector.add_(self.gradient)

    @property
    def offsets(self) -> tuple[int, ...]:
        # As many tensors as there can be, so that a method may cut anywhere.
        return tuple(range(len(self.x) + 1))

    def vector(self, name: str, size: int | None = None) -> Tensor:
        return self.vectors.setdefault(name, self.x.new_zeros(len(self.x) if size is None else size))

    def optimizer_setting(self, name: str) -> Any:
        settings = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0}
        return settings.get(name, False)

    def read_optimizer_state(self, name: str) -> Tensor:
        return self._optimizer_state.setdefault(name, torch.ones_like(self.x)).clone()

    def write_optimizer_state(self, name: str, value: Tensor) -> None:
        self._optimizer_state[name] = value.clone()

    def snapshot(self, write: Any = None) -> Tensor:
        if write is None:
            self._snapshot.copy_(self.x)
        else:
            write(self, self._snapshot)
        return self._snapshot
