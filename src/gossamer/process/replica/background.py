"""The background part of a method on one rank of a replica, so that all its ranks do the same.

Each rank runs the method's ``background`` on its own part of the vectors. The method's code runs only at *boundaries*,
the ends of optimizer steps: all ranks continue it at the same one, so what it reads and changes is of one version of
the weights. Between boundaries the ranks communicate, each with the same rank of another replica:

- The first rank pairs and waits for steps; the others hear what it has decided.
- Each rank moves its own part. Then the ranks compare what came of it. An exchange counts if it took place on all of
  them. Both ends of a connection agree on whether it took place (``pairwise/edge``), so both replicas come to the same
  result without asking each other.
- What is judged by norms is judged by those of the whole vectors, on both replicas with the same numbers.

This is the protocol alone, without threads, clocks and sockets: a generator that yields requests. ``driver`` answers
them for real, ``tests/process/replica_world.py`` in a simulated world with delays, losses and deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gossamer.effects import Effect, Gather, MethodGenerator, Pair, Start, Swap, Ticket, Wait, WaitSteps
from gossamer.process.runtime.worker_state import is_finite

EXCHANGE, TAKE, GO_ON, END = "exchange", "take", "go on", "end"
"""What the first rank decides: exchange with a replica, take over its state, go on after a wait, end the training."""

COMPLETED, LOST, ENDED = 0, 1, 2
"""What came of a communication on one rank."""

Row = tuple[float, ...]
"""What a rank tells the others of what came of its communication: first one of the above."""


class Decision(NamedTuple):
    kind: str
    peer: int = -1
    number: int = 0
    """Of the exchange, the same in both replicas."""


class Moved(NamedTuple):
    """What came of a communication on this rank."""

    row: Row
    answer: Any = None


# The requests


@dataclass(frozen=True)
class AtBoundary:
    """Run ``act`` at a boundary, on all ranks at the same one. The answer: what it returns."""

    act: Callable[[], Any]


@dataclass(frozen=True)
class Decide:
    """The first rank waits for what ``effect`` asks for. The answer: its ``Decision``."""

    effect: Pair | WaitSteps


@dataclass(frozen=True)
class Move:
    """Do this rank's part of a communication. The answer: ``Moved``."""

    effect: Effect
    decision: Decision
    """For a ``Swap``: on which exchange both replicas have agreed."""


@dataclass(frozen=True)
class TakeState:
    """Receive this rank's part of the state of another replica. The answer: ``Moved``."""

    decision: Decision


@dataclass(frozen=True)
class Rebuild:
    """Agree on the members of collectives anew, in the run of this shard. The answer: ``Moved``."""


@dataclass(frozen=True)
class Compare:
    """Tell the other ranks of this replica. The answer: the rows of all, in the order of the shards."""

    row: Row


Request = AtBoundary | Decide | Move | TakeState | Rebuild | Compare


class Part(Protocol):
    """This rank's part of the replica's state. What it does, it does at once."""

    def start(self) -> MethodGenerator:
        """Return a new generator of the method's background part."""

    def resume(self, generator: MethodGenerator, answer: Any) -> Effect | None:
        """Let the method go on with an answer; return its next effect, None if it has ended."""

    def judge(self, decision: Decision, rows: Sequence[Row]) -> bool:
        """Return whether to merge an exchange that took place on all ranks. Called with the same on all of them."""

    def take_over(self, state: Any) -> None:
        """Continue from this part of another replica's state."""

    @property
    def owns_membership(self) -> bool:
        """Whether collectives of the background alone use the membership, so that it is rebuilt here."""

    def freeze(self) -> None:
        """From now on give and take over states of this moment only, until ``thaw``."""

    def thaw(self) -> None:
        """Continue from what was taken over since ``freeze``."""


class CollectiveLost(Exception):
    """A collective was lost on some rank, so it does not count on any: the method's background part begins anew."""


class _Ended(Exception):
    """The training has ended."""


def run_background(part: Part) -> Generator[Request, Any, None]:
    """Run the background part of a method as one rank of a replica, until the training ends."""
    ranks = _Ranks(part)
    generator, answer = part.start(), None
    try:
        while True:
            effect = yield AtBoundary(partial(part.resume, generator, answer))
            if effect is None:
                return
            try:
                answer = yield from ranks.answer(effect)
            except CollectiveLost:
                generator.close()
                generator, answer = part.start(), None
    except _Ended:
        pass
    finally:
        generator.close()


class _Ranks:
    """Answers effects together with the other ranks."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._decision = Decision(END)
        """On which exchange we have agreed."""

    def answer(self, effect: Effect) -> Generator[Request, Any, Any]:
        if isinstance(effect, Pair):
            return (yield from self._pair(effect))
        if isinstance(effect, WaitSteps):
            yield from self._decide(effect)
            return None
        if isinstance(effect, Start):
            # What it starts waits for the background part only, so ``Wait`` is soon enough.
            return Ticket(effect.effect)
        if isinstance(effect, Wait):
            ticket = effect.ticket
            if not ticket.done:
                ticket.answer, ticket.done = (yield from self.answer(ticket.effect)), True
            return ticket.answer
        if isinstance(effect, Swap):
            return (yield from self._swap(effect))
        return (yield from self._collective(effect))

    def _decide(self, effect: Pair | WaitSteps) -> Generator[Request, Any, Decision]:
        decision: Decision = yield Decide(effect)
        if decision.kind == END:
            raise _Ended
        return decision

    def _compare(self, row: Row) -> Generator[Request, Any, list[Row]]:
        rows: list[Row] = yield Compare(row)
        if any(each[0] == ENDED for each in rows):
            raise _Ended
        return rows

    # Exchanges

    def _pair(self, effect: Pair) -> Generator[Request, Any, int]:
        while True:
            decision = yield from self._decide(effect)
            if decision.kind == EXCHANGE:
                self._decision = decision
                return decision.peer
            taken: Moved = yield TakeState(decision)
            rows = yield from self._compare(taken.row)
            if all(row[0] == COMPLETED for row in rows):
                yield AtBoundary(partial(self._part.take_over, taken.answer))

    def _swap(self, effect: Swap) -> Generator[Request, Any, Any]:
        moved: Moved = yield Move(effect, self._decision)
        rows = yield from self._compare(moved.row)
        whole = all(row[0] == COMPLETED for row in rows)
        return moved.answer if whole and self._part.judge(self._decision, rows) else None

    # Collectives

    def _collective(self, effect: Any) -> Generator[Request, Any, Any]:
        finite = sends_finite(effect)
        rows = yield from self._compare((COMPLETED, float(finite)))
        if finite and not all(row[1] for row in rows):
            # So all shards refuse the same replicas.
            effect = not_finite(effect)
        moved: Moved = yield Move(effect, self._decision)
        rows = yield from self._compare(moved.row)
        if len(set(rows)) == 1 and rows[0][0] == COMPLETED:
            return moved.answer
        if self._part.owns_membership:
            yield from self._rebuild()
        raise CollectiveLost

    def _rebuild(self) -> Generator[Request, Any, None]:
        """Rebuild the memberships of all shards until they are the same, with states of one boundary."""
        yield AtBoundary(self._part.freeze)
        rows: list[Row] = []
        while len(set(rows)) != 1 or rows[0][0] != COMPLETED:
            rebuilt: Moved = yield Rebuild()
            rows = yield from self._compare(rebuilt.row)
        yield AtBoundary(self._part.thaw)


def sends_finite(effect: Any) -> bool:
    """Return whether all that this rank sends in a collective is finite, as its shard's run judges it."""
    tensors = effect.tensors if isinstance(effect, Gather) else (effect.vector,)
    return all(is_finite(tensor) for tensor in tensors if tensor.is_floating_point())


def not_finite(effect: Any) -> Any:
    """Return the same collective with tensors that are not finite, which all refuse."""
    if isinstance(effect, Gather):
        return replace(effect, tensors=tuple(map(_not_finite, effect.tensors)))
    return replace(effect, vector=_not_finite(effect.vector))


def _not_finite(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor
