"""Effects: what a method can request while it runs.

A method is written as generators. It *yields* one of these objects and receives the answer as the value of the
``yield``. On real workers the answer comes from real communication, in the virtual cluster from simulated time; the
method cannot tell the difference.

| effect | what happens | answer | in |
|---|---|---|---|
| ``Update`` | the worker's optimizer takes one step | ``None`` | ``step`` |
| ``Mean`` | an all-reduce: the (weighted) mean of a vector over a group | the mean, read-only | all |
| ``Gather`` | an all-gather: the tensors of every member | a list of tuples of tensors | all |
| ``Shift`` | send a vector to one worker, receive that of another | ``Shifted`` | ``step``, ``background`` |
| ``Pair`` | wait for a neighbour that is ready, so often per gradient | the peer's rank | ``background`` |
| ``Swap`` | send a vector to the peer, receive its vector | that vector; ``None``: the peer left | ``background`` |
| ``WaitSteps`` | wait until the worker has done so many more steps | ``None`` | ``background`` |
| ``Start`` | start a communication and return at once | a ``Ticket`` | as what it starts |
| ``Wait`` | wait for a started communication | its answer | all |

**The contract.** Both worlds check it, and raise one clear line (``MethodError``) at the first effect that breaks it.

- Every generator declares what it yields: ``@yields(Mean, Update)``, with what it starts. From that the worlds know
  whether workers wait for each other within a step, and which connections they need. A generator that does not say so
  is refused before the first step.
- The last column says which generators may yield an effect. A background part either exchanges in pairs (``Pair``,
  ``Swap``) or communicates by collectives, not both.
- Vectors are one-dimensional and on the worker's device: ``worker.x``, ``worker.gradient``, ``worker.vector(name)``,
  slices of them, or tensors of the method's own. All members of a collective send the same length and dtype.
- Workers take part in the same collective if its kind, ``topic``, ``round`` and ``group`` are equal. The rounds of one
  topic ascend. If two workers wait for each other in different ones, both get an error that names both sides.
- A tensor that is sent must not change until the answer has arrived. Where training continues meanwhile, send
  ``worker.snapshot()``.
- ``scalars`` travel along with a vector. If they are given, the answer is ``(answer, scalars)``: those of the peer, or
  their mean.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Let the worker's optimizer take one step.

    Only ``step`` may yield it, at most once. What precedes it runs before the optimizer's step, what follows it runs
    after. The answer is ``None``.
    """

    gradient: Tensor | None = None
    """The gradient to step with, such as the answer to a ``Mean``; ``None``: ``worker.gradient``."""


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """Average ``vector`` over a group of workers.

    The answer is the mean, a tensor that the method must not write to; ``(mean, mean of the scalars)`` if ``scalars``
    are given. It is valid until the method asks for the next mean of the same topic, or starts it: that one may take
    its memory.
    """

    vector: Tensor
    """What this worker contributes. It must not change until the answer has arrived."""
    round: int
    """Number of this averaging within its topic, the same on all members."""
    topic: str = "mean"
    """Purpose of the averaging, which keeps concurrent averagings apart."""
    group: tuple[int, ...] | None = None
    """Ranks of the members, in ascending order; ``None``: all workers that are alive."""
    weight: float = 1.0
    """Weight of this worker's vector and scalars in the mean, not negative. If all weights are 0, so is the mean."""
    scalars: tuple[float, ...] = ()
    """Numbers that are averaged along with the vector."""
    same: bool = False
    """Whether all members need the same answer to the bit, for state that is equal on all workers. Otherwise, where
    vectors are rounded on the wire (``gossamer.wire``), each member's answer includes what its own vector lost, so that
    the members' displacements ``answer − vector`` still sum to zero."""


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Collect the tensors of a group of workers, for messages that an all-reduce cannot sum.

    The answer is a list with one tuple of tensors per member, in the order of their ranks.
    """

    tensors: tuple[Tensor, ...]
    """What this worker contributes. The tensors must not change until the answer has arrived."""
    round: int
    """Number of this collective within its topic, the same on all members."""
    topic: str = "gather"
    """Purpose of the collective, which keeps concurrent ones apart."""
    group: tuple[int, ...] | None = None
    """Ranks of the members, in ascending order; ``None``: all workers that are alive."""


@dataclass(frozen=True, slots=True, eq=False)
class Shift:
    """Send ``vector`` to worker ``to`` and receive what worker ``source`` sends to this one. The answer: ``Shifted``.

    All workers that are alive take part. In one round the workers' ``to`` are a permutation of them, and ``source``
    its inverse.
    """

    vector: Tensor
    """What this worker sends. It must not change until the answer has arrived."""
    to: int
    """The rank that receives it; it may be this worker's own."""
    source: int
    """The rank whose vector this worker receives."""
    round: int
    """Number of this collective within its topic, the same on all workers."""
    topic: str = "shift"
    """Purpose of the collective, which keeps concurrent ones apart."""
    scalars: tuple[float, ...] = ()
    """Numbers that travel along with the vector."""


class Shifted(NamedTuple):
    """The answer to a ``Shift``."""

    vector: Tensor | None
    """What ``source`` sent; ``None`` if it is gone."""
    scalars: tuple[float, ...]
    """What ``source`` sent along."""
    delivered: bool
    """Whether ``to`` is there to receive; if not, nothing was sent."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Wait for a neighbour in the topology that is ready for an exchange too. The answer is the peer's rank."""

    rate: float
    """Exchanges per gradient of this worker, on average, at random moments; ``inf``: ready at once."""


# Not frozen: there is one for every exchange, and creating a frozen one takes twice as long.
@dataclass(slots=True, eq=False)
class Swap:
    """Send ``vector`` to ``peer`` and receive its vector. All swaps of a run have one length.

    The answer is ``None`` if the peer left before it sent; ``(vector, scalars)`` if ``scalars`` are given.
    """

    vector: Tensor
    """What this worker sends. It must not change until the answer has arrived."""
    peer: int
    """The rank that ``Pair`` answered. Each answer of ``Pair`` is for one ``Swap``."""
    scalars: tuple[float, ...] = ()
    """Numbers that travel along with the vector, as many as the peer sends."""


@dataclass(frozen=True, slots=True)
class WaitSteps:
    """Wait until the worker has done ``count`` more steps. The answer is ``None``."""

    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Start a communication and return at once. The answer is a ``Ticket``, for a later ``Wait``.

    Keep the ticket in ``worker.tickets``, so that checkpoints contain what is in flight. A ``Swap`` that was started is
    waited for before the next ``Pair``.
    """

    effect: Mean | Gather | Shift | Swap


@dataclass(slots=True, eq=False)
class Ticket:
    """A communication in flight."""

    effect: Mean | Gather | Shift | Swap
    since_step: int = 0
    """The step at which the worker started it."""
    done: bool = False
    """Whether ``answer`` has arrived."""
    answer: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Wait for a started communication. The answer is that of the started effect."""

    ticket: Ticket


MAX_SCALARS = 8
"""Scalars that may travel along with a vector."""

Effect = Update | Mean | Gather | Shift | Pair | Swap | WaitSteps | Start | Wait

MethodGenerator = Generator[Effect, Any, None]
"""Type of a method's ``step``, ``background`` and ``finish``: they yield effects, receive answers, return nothing."""

Part = TypeVar("Part", bound=Callable[..., MethodGenerator])


def yields(*effects: type, gradient_topic: str = "") -> Callable[[Part], Part]:
    """Declare which effects a generator of a method yields, including those that it starts.

    ``gradient_topic``: every ``step`` begins with ``Mean(worker.gradient, worker.step, gradient_topic)``. Real workers
    then send the gradient while the backward pass still computes the rest of it.

    ```python
    @yields(Mean, Update)
    def step(self, worker): ...
    ```
    """

    def declare(generator: Part) -> Part:
        generator.yields = frozenset(effects)  # type: ignore[attr-defined]
        generator.gradient_topic = gradient_topic  # type: ignore[attr-defined]
        return generator

    return declare
