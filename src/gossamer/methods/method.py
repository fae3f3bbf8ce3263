"""The interface of a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gossamer.effects import MethodGenerator, Update
from gossamer.settings import Settings
from gossamer.topology import Topology
from gossamer.topology.disagreement import Disagreement
from gossamer.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Settings):
    """The settings of a method. This base class has none; fields are declared with ``gossamer.settings.option``."""


class Method:
    """An algorithm that trains one model on many workers.

    A method does no communication by itself and knows no threads, sockets or clocks: ``step``, ``background`` and
    ``finish`` are generators that yield the effects of ``gossamer.effects`` and receive the answers. The same code
    runs on real workers and in the virtual cluster.

    The object holds settings only. All state of a worker is in the worker (``gossamer.Worker``).
    """

    name: ClassVar[str]
    """Its name on the command line."""
    summary: ClassVar[str]
    """One line for lists."""
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    """The class of its settings, from which the command line derives options."""
    lockstep: ClassVar[bool] = False
    """Whether workers wait for each other within a step, so that all do the same number of steps."""
    pairwise: ClassVar[bool] = False
    """Whether workers exchange in pairs (``Pair``, ``Swap``); otherwise they communicate by collectives."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors, scalars and tickets that are equal on all workers. A worker that joins copies them."""
    shared_vectors: ClassVar[tuple[str, ...]] = ()
    """Those of ``shared`` that are vectors as long as the parameters."""
    same_updates: ClassVar[bool] = False
    """Whether all workers' optimizers do the same update, so that a worker that joins needs their optimizer state."""
    preferred_optimizer: ClassVar[str] = ""
    """The optimizer to use if the user names none; empty: the task's default."""
    uses_topology: ClassVar[bool] = True
    """Whether workers communicate along the topology; otherwise all workers average together."""
    planned_options: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """The settings that the planner compares."""

    def __init__(self, config: MethodConfig, topology: Topology) -> None:
        self.topology = topology

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ``InputError`` if the method cannot work with this optimizer."""

    def eval_point(self, worker: Worker, out: Tensor) -> None:
        """Write into ``out`` the parameters at which the next gradient is evaluated."""
        out.copy_(worker.x)

    def step(self, worker: Worker) -> MethodGenerator:
        """Run in the foreground, once per gradient.

        If a member dies during a collective, this generator is abandoned at its ``yield``, and
        ``on_membership_change`` is called.
        """
        yield Update()

    def background(self, worker: Worker) -> MethodGenerator:
        """Run concurrently with the steps, from the first step to the end of training."""
        yield from ()

    def finish(self, worker: Worker) -> MethodGenerator:
        """Run once, after the last step, and apply what is still in flight."""
        yield from ()

    def on_membership_change(self, worker: Worker) -> None:
        """Discard what was in flight among the old members. All members are at the same step when this is called."""
        worker.tickets.clear()

    def disagreement(self) -> Disagreement | None:
        """Return the model that predicts how far apart the workers will be, or None if there is none."""
        return None
