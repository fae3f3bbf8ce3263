"""What a method sees of the worker it runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from gossamer.effects import Ticket
from gossamer.topology import Topology


class Worker(Protocol):
    """One worker, as its method sees it; each world has its own kind.

    Everything a method has to remember lives in ``vector(name)``, ``scalars`` and ``tickets`` and nowhere else, so
    that a checkpoint holds it and a worker that joins late can take it over from a peer.
    """

    @property
    def rank(self) -> int: ...

    @property
    def num_workers(self) -> int:
        """How many workers the run was set up for, dead ones included."""

    @property
    def topology(self) -> Topology: ...

    @property
    def seed(self) -> int:
        """The run's seed, the same on all workers: what is drawn from it is drawn alike everywhere."""

    @property
    def rng(self) -> np.random.Generator:
        """This worker's own random numbers."""

    @property
    def step(self) -> int:
        """How many steps this worker has made."""

    @property
    def time(self) -> float:
        """Local time: one unit is what one gradient takes this worker on average."""

    @property
    def x(self) -> Tensor:
        """The parameters as one flat vector, to be changed in place."""

    @property
    def gradient(self) -> Tensor:
        """The newest mini-batch gradient, flat; the optimizer steps with what is in it."""

    @property
    def scalars(self) -> dict[str, float]: ...

    @property
    def tickets(self) -> dict[str, Ticket]: ...

    def vector(self, name: str, size: int | None = None) -> Tensor:
        """A vector of the method's own by name: zero at first, as long as ``x`` unless a size is given."""

    def optimizer_setting(self, name: str) -> Any:
        """A hyper-parameter of the optimizer now, the learning rate as scheduled."""

    def snapshot(self, write: Callable[[Worker, Tensor], None] | None = None) -> Tensor:
        """What travels: a copy of ``x``, or what ``write`` puts into the tensor that it is given."""
