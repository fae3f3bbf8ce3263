"""Effects: what a method can request while it runs.

A method is written as generators. It *yields* one of these objects and receives the answer as the value of the
``yield``. On real workers the answer comes from real communication, in the virtual cluster from simulated time; the
method cannot tell the difference.

| effect | what happens | answer |
|---|---|---|
| ``Update()`` | the worker's optimizer takes one step | ``None`` |
| ``Mean(vector, round, topic, group)`` | an all-reduce: the mean of ``vector`` over the group | the mean, read-only |
| ``Gather(tensors, round, topic)`` | an all-gather: the tensors of every worker | a list of tuples of tensors |
| ``Pair(rate)`` | wait for a neighbour that is ready, ``rate`` times per gradient | the peer's rank |
| ``Swap(vector, peer)`` | send ``vector`` to the peer and receive its vector | that vector, ``None`` if the peer left |
| ``WaitSteps(count)`` | wait until the worker has done ``count`` more steps | ``None`` |
| ``Start(effect)`` | start a ``Mean`` or ``Gather`` and return at once | a ``Ticket`` |
| ``Wait(ticket)`` | wait for a started communication | its answer |

A tensor that is sent must not change until the answer has arrived. Where training continues meanwhile, send
``worker.snapshot()``.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Update:
    """Let the worker's optimizer take one step with ``worker.gradient``.

    Only ``step`` may yield it, at most once. What precedes it runs before the optimizer's step, what follows it runs
    after. The answer is ``None``.
    """


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """Average ``vector`` over a group of workers.

    Workers take part in the same collective if ``topic``, ``round`` and ``group`` are equal. The rounds of one topic
    ascend. The answer is the mean, a tensor that the method must not write to.
    """

    vector: Tensor
    """What this worker contributes. It must not change until the answer has arrived."""
    round: int
    """Number of this averaging within its topic, the same on all members."""
    topic: str = "mean"
    """Purpose of the averaging, which keeps concurrent averagings apart."""
    group: tuple[int, ...] | None = None
    """Ranks of the members; ``None``: all workers that are alive."""


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Collect the tensors of all workers that are alive, for messages that an all-reduce cannot sum.

    Workers take part in the same collective if ``topic`` and ``round`` are equal. The answer is a list with one tuple
    of tensors per worker, in the order of their ranks.
    """

    tensors: tuple[Tensor, ...]
    """What this worker contributes. The tensors must not change until the answer has arrived."""
    round: int
    """Number of this collective within its topic, the same on all workers."""
    topic: str = "gather"
    """Purpose of the collective, which keeps concurrent ones apart."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Wait for a neighbour in the topology that is ready for an exchange too. The answer is the peer's rank."""

    rate: float
    """Exchanges per gradient of this worker, on average."""


# Not frozen: there is one for every exchange, and creating a frozen one takes twice as long.
@dataclass(slots=True, eq=False)
class Swap:
    """Send ``vector`` to ``peer`` and receive its vector. The answer is ``None`` if the peer left before it sent."""

    vector: Tensor
    """What this worker sends. It must not change until the answer has arrived."""
    peer: int
    """The rank that ``Pair`` answered."""


@dataclass(frozen=True, slots=True)
class WaitSteps:
    """Wait until the worker has done ``count`` more steps. The answer is ``None``."""

    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Start a ``Mean`` or ``Gather`` and return at once. The answer is a ``Ticket``, for a later ``Wait``.

    Keep the ticket in ``worker.tickets``, so that checkpoints contain what is in flight.
    """

    effect: Mean | Gather


@dataclass(slots=True, eq=False)
class Ticket:
    """A communication in flight."""

    effect: Mean | Gather
    since_step: int = 0
    """The step at which the worker started it."""
    done: bool = False
    """Whether ``answer`` has arrived."""
    answer: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Wait for a started communication. The answer is that of the started effect."""

    ticket: Ticket


Effect = Update | Mean | Gather | Pair | Swap | WaitSteps | Start | Wait

MethodGenerator = Generator[Effect, Any, None]
"""Type of a method's ``step``, ``background`` and ``finish``: they yield effects, receive answers, return nothing."""
