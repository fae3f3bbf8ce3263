"""The worker as its method sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from gossamer.effects import Ticket
    from gossamer.topology import Topology


class Worker(Protocol):
    """One worker: a replica of the model, and the state that its method keeps for it.

    A method keeps all of its state in ``vector(name)``, ``scalars`` and ``tickets``, and none in its own attributes.
    That is what checkpoints contain, and what a worker that joins late receives from its peers.
    """

    @property
    def rank(self) -> int:
        """The number of this worker among those of the run, from 0 to ``num_workers`` − 1."""

    @property
    def num_workers(self) -> int:
        """Number of workers of the run, including dead ones. It changes where some come later, or leave for good."""

    @property
    def topology(self) -> Topology:
        """The graph of the workers: ``topology.neighbours(rank)``, ``topology.group(round, rank)``."""

    @property
    def seed(self) -> int:
        """The seed of the run. It is the same on all workers: use it for random choices that all workers share."""

    @property
    def rng(self) -> np.random.Generator:
        """A random generator of this worker's own."""

    @property
    def step(self) -> int:
        """Number of steps that this worker has done."""

    @property
    def time(self) -> float:
        """Local time, in units of this worker's average time per gradient."""

    @property
    def x(self) -> Tensor:
        """The parameters as one flat vector. Methods change it in place."""

    @property
    def gradient(self) -> Tensor:
        """The newest mini-batch gradient as one flat vector. The optimizer steps with its content."""

    def add_gradient(self, vector: Tensor) -> None:
        """Add ``gradient`` to ``vector``. A real worker has the gradient in pieces, and need not join them first."""

    @property
    def scalars(self) -> dict[str, float]:
        """Numbers that the method keeps, by name."""

    @property
    def tickets(self) -> dict[str, Ticket]:
        """Communication in flight that spans steps, by name."""

    def vector(self, name: str, size: int | None = None) -> Tensor:
        """Return the vector that the method keeps under this name.

        The first call creates it: zeros, as long as ``x`` unless ``size`` is given.
        """

    def optimizer_setting(self, name: str) -> Any:
        """Return a hyper-parameter of the optimizer at this step, for example the scheduled ``"lr"``."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter tensor begins in ``x``, and behind them the length of ``x``."""

    def read_optimizer_state(self, name: str) -> Tensor:
        """Return a copy of the optimizer's state ``name``, for example ``"exp_avg"``, as one flat vector.

        Zeros where the optimizer has no such state yet. ``InputError`` if it keeps no vectors of that name.
        """

    def write_optimizer_state(self, name: str, value: Tensor) -> None:
        """Replace the optimizer's state ``name`` by the content of a flat vector.

        It has no effect on parameters for which the optimizer has no state yet: before its first step.
        """

    def snapshot(self, write: Callable[[Worker, Tensor], None] | None = None) -> Tensor:
        """Return a copy of ``x`` to send, or what ``write(worker, out)`` writes into ``out``.

        The buffer is reused: the next snapshot of this worker overwrites it.
        """
