"""The interface of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gossamer.effects import MethodGenerator
from gossamer.methods.loading.method_contract import PAIRWISE, WAITING, declared
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


class _Derived:
    """An attribute of a method, and of its class, that follows from what its generators declare."""

    def __init__(self, derive: Callable[[Any], bool], meaning: str) -> None:
        self._derive, self.__doc__ = derive, meaning

    def __get__(self, method: Method | None, owner: type[Method]) -> bool:
        return self._derive(owner if method is None else method)


class Method:
    """An algorithm that trains one model on many workers.

    A method does no communication by itself and knows no threads, sockets or clocks: ``step``, ``background`` and
    ``finish`` are generators that yield the effects of ``gossamer.effects`` and receive the answers. The same code
    runs on real workers and in the virtual cluster. ``gossamer.effects`` has the contract, ``gossamer.testing`` checks
    a method against it.

    A part that a method does not have is ``None``. A method may inherit from another, or wrap one: then it gives its
    own parts, or those of the other, as attributes of the object.

    The object holds settings only. All state of a worker is in the worker (``gossamer.Worker``).
    """

    name: ClassVar[str]
    """Its name on the command line."""
    summary: ClassVar[str]
    """One line for lists."""
    Config: ClassVar[type[MethodConfig]] = MethodConfig
    """The class of its settings, from which the command line derives options."""
    shared: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors, scalars and tickets that are equal on all workers. A worker that joins copies them."""
    preferred_optimizer: ClassVar[str] = ""
    """The optimizer to use if the user names none; empty: the task's default."""
    uses_topology: ClassVar[bool] = True
    """Whether workers communicate along the topology; otherwise all workers average together."""
    sends_models: ClassVar[bool] = True
    """Whether models travel, which may be rounded on the wire; otherwise gradients do."""
    keeps_gradient: ClassVar[bool] = False
    """Whether ``step`` has changed nothing before its first answer, and sends nothing but its gradient until then. If a
    member dies meanwhile, the step begins again with the same gradient, also at weights that are a step ahead of it;
    otherwise that gradient is dropped."""
    planned_options: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """The settings that the planner compares."""
    gives_up: ClassVar[tuple[str, ...]] = ()
    """The invariants of ``gossamer.testing`` that do not hold for this method, by design."""

    step: Callable[..., MethodGenerator] | None = None
    """``step(worker)`` runs in the foreground, once per gradient; ``None``: one optimizer step, ``yield Update()``.

    If a member dies during a collective, this generator is abandoned at its ``yield``, ``on_membership_change`` is
    called, and the step is repeated.
    """
    background: Callable[..., MethodGenerator] | None = None
    """``background(worker)`` runs concurrently with the steps, from the first step to the end of training."""
    finish: Callable[..., MethodGenerator] | None = None
    """``finish(worker)`` runs once, after the last step, and applies what is still in flight."""
    eval_point: Callable[..., None] | None = None
    """``eval_point(worker, out)`` writes into ``out`` the parameters at which the next gradient is evaluated; ``None``:
    it is evaluated at ``worker.x``."""

    lockstep = _Derived(
        lambda method: bool(declared(method, "step") & WAITING),
        "Whether workers wait for each other within a step, so that all do the same number of steps.",
    )
    pairwise = _Derived(
        lambda method: bool(declared(method, "background") & PAIRWISE),
        "Whether workers exchange in pairs (``Pair``, ``Swap``).",
    )

    config: Any
    """The settings that this object was built with. All workers of a run must have the same."""

    def __init__(self, config: MethodConfig, topology: Topology) -> None:
        self.config, self.topology = config, topology

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ``InputError`` if the method cannot work with this optimizer."""

    def begin(self, worker: Worker) -> None:
        """Run once when a worker begins with its initial weights, and when it has taken over the state of another.

        ``worker.x`` and what is ``shared`` are set by then; every other vector and scalar is new.
        """

    def on_membership_change(self, worker: Worker) -> None:
        """Discard what was in flight among the old members. All members are at the same step when this is called."""
        worker.tickets.clear()

    def on_topology_change(self, topology: Topology) -> None:
        """Go on with the topology of another number of workers: some came, or left for good.

        A method that keeps numbers that follow from its topology computes them anew here. It runs between two steps,
        while no part of the method does; with collectives on all workers after the same step.
        """
        self.topology = topology

    def steps_until_shared(self, step: int) -> int:
        """Return how many steps after step number ``step`` the others have all that a worker did until then.

        0 for methods that share each step, and where ``background`` waits for steps: a worker that leaves for good
        lets that go on at once. Before it leaves, it makes so many steps without an update.
        """
        return 0

    def conserved(self, worker: Worker) -> Tensor:
        """Return this worker's part of the sum that only the workers' own updates move (``gossamer.testing``)."""
        return worker.x

    def disagreement(self) -> Disagreement | None:
        """Return the model that predicts how far apart the workers will be, or None if there is none."""
        return None
