"""What every method is: two small generators that ask, and a few facts about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gossamer.effects import MethodGenerator, Update
from gossamer.settings import Settings
from gossamer.topology import Topology
from gossamer.topology.disagreement import Disagreement
from gossamer.worker import Worker


@dataclass(frozen=True, kw_only=True)
class MethodConfig(Settings):
    """The settings of a method that has none."""


class Method:
    """One way to train on many workers.

    A method never touches a socket, a thread or a clock: ``step`` and ``background`` yield the effects of
    ``gossamer.effects`` and the world that drives them answers. It holds no state of its own: what a worker has to
    remember lives in the worker.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for lists."""
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    lockstep: ClassVar[bool] = False
    """Workers wait for each other within a step, so all make the same number of steps."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors, scalars and tickets that are alike on all workers: a worker that joins takes them over."""
    shared_vectors: ClassVar[tuple[str, ...]] = ()
    """Which of those are vectors as long as the parameters."""
    pairwise: ClassVar[bool] = False
    """Workers exchange in pairs; the others' methods meet in groups."""
    same_updates: ClassVar[bool] = False
    """All workers' optimizers make the same update: one that joins needs the others' optimizer state too."""
    preferred_optimizer: ClassVar[str] = ""
    """The optimizer to take when the user names none; empty: whatever suits the task."""

    def __init__(self, config: MethodConfig, topology: Topology) -> None:
        self.topology = topology

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``InputError`` if the method cannot work with this optimizer."""

    def eval_point(self, worker: Worker, out: Tensor) -> None:
        """Write into ``out`` where the next gradient is evaluated."""
        out.copy_(worker.x)

    def step(self, worker: Worker) -> MethodGenerator:
        """In the foreground, once per local gradient."""
        yield Update()

    def background(self, worker: Worker) -> MethodGenerator:
        """Beside the training, for as long as it lasts."""
        yield from ()

    def on_membership_change(self, worker: Worker) -> None:
        """The group was rebuilt, and all members are at the same step: drop what was under way among the old ones."""
        worker.tickets.clear()

    def disagreement(self) -> Disagreement | None:
        """What the topology's spectrum says about how far apart the workers will be; None if it says nothing."""
        return None

    def finish(self, worker: Worker) -> MethodGenerator:
        """Once, after the last step: apply what is still under way."""
        yield from ()
