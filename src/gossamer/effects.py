"""What a method can ask of the world that drives it.

A method is written as generators that *yield* one of these and are sent the answer. The process world answers
with real communication, the virtual world with simulated time; the method cannot tell which.

=================  ============================================================  ==============================
effect             what the world does                                           answer
=================  ============================================================  ==============================
``Update()``       lets the worker's own optimizer take one step                 ``None``
``Mean(v, …)``     averages ``v`` over a group of workers                        the mean, not to be written to
``Gather(ts, …)``  collects tensors from every worker                            a list of tuples of tensors
``Pair(rate)``     finds a neighbour that is ready too, ``rate`` per gradient    the peer's rank
``Swap(v, peer)``  trades vectors with that peer                                 its vector, ``None`` if it left
``WaitSteps(k)``       waits until the worker has made ``k`` more steps              ``None``
``Start(effect)``  begins a ``Mean`` or ``Gather`` and comes back at once        a ``Ticket``
``Wait(ticket)``   waits for what was started                                    its answer
=================  ============================================================  ==============================
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Update:
    """Let the worker's optimizer take one step with ``worker.gradient``."""


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """The plain mean of ``vector`` over ``group`` (all workers alive if ``None``).

    Workers meet in the same averaging when ``topic``, ``round`` and ``group`` agree; a topic's rounds are made in
    ascending order. The vector must not change until the answer is there.
    """

    vector: Tensor
    round: int
    topic: str = "mean"
    group: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """The ``tensors`` of every worker alive, in rank order: for messages that cannot be summed under way."""

    tensors: tuple[Tensor, ...]
    round: int
    topic: str = "gather"


@dataclass(frozen=True, slots=True)
class Pair:
    """A neighbour that is ready to exchange too, paced to ``rate`` exchanges per gradient of this worker."""

    rate: float


# Not frozen: there is one for every exchange, and it is made in half the time.
@dataclass(slots=True, eq=False)
class Swap:
    """Send ``vector`` to ``peer`` and receive its vector; ``None`` if the peer went away meanwhile."""

    vector: Tensor
    peer: int


@dataclass(frozen=True, slots=True)
class WaitSteps:
    """Wait until the worker has made ``count`` more steps."""

    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Begin a ``Mean`` or ``Gather`` and go on; ``Wait`` for the ticket when the answer is needed."""

    effect: Mean | Gather


@dataclass(slots=True, eq=False)
class Ticket:
    """A communication under way: ``answer`` is there once ``done``."""

    effect: Mean | Gather
    since_step: int = 0
    """The step at which the worker started it."""
    done: bool = False
    answer: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Wait for a started communication and take its answer."""

    ticket: Ticket


Effect = Update | Mean | Gather | Pair | Swap | WaitSteps | Start | Wait

MethodGenerator = Generator[Effect, Any, None]
"""What a method's ``step`` and ``background`` are: they yield effects, are sent answers, and return nothing."""
