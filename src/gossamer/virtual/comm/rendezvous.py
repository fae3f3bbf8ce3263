"""Rendezvous: the workers that take part in one round of a collective wait for each other.

Workers take part in the same collective if its kind, topic, round and group are equal. A rendezvous is complete when
every expected worker has arrived. Expected is a member that is alive and whose last round of this topic is an earlier
one. A worker that dies is not expected any more. A worker that joins takes over its peer's last rounds, so it is
expected from the peer's next round on.

Rounds of one topic ascend on each worker. So a worker that arrives in a later round than one in which others expect it,
or in another kind of collective, will never come to them: that is an error of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gossamer.effects import Shift
from gossamer.errors import MethodError
from gossamer.virtual.comm.messages import Collective, check_fits, signature, text
from gossamer.virtual.sim.virtual_worker import VirtualWorker

OnAnswer = Callable[[Any], None]
"""Called with the result of the collective."""

Group = tuple[int, ...] | None

NO_ROUND: tuple[int, Group] = (-1, None)


class Rendezvous:
    """One round of a collective, and the workers that have arrived."""

    def __init__(self, effect: Collective, members: tuple[VirtualWorker, ...], part: str, method: str) -> None:
        self.kind, self.topic, self.round, self.members = type(effect), effect.topic, effect.round, members
        self.effect, self.part, self.method = effect, part, method
        """The first worker's effect, and the generator that yielded it."""
        self.arrived: dict[int, tuple[VirtualWorker, Collective, OnAnswer]] = {}
        self.signature: tuple[Any, ...] = ()
        """What all have to send alike."""
        self.is_open = True
        self.num_missing = 0
        self.count_missing()

    def expects(self, worker: VirtualWorker) -> bool:
        """Whether this member is still to arrive."""
        return worker.alive and worker.rank not in self.arrived and worker.last_rounds.get(self.topic, -1) < self.round

    def missing(self) -> list[VirtualWorker]:
        return [worker for worker in self.members if self.expects(worker)]

    def awaited(self, rank: int) -> list[VirtualWorker]:
        """Return the workers for which this member waits."""
        return self.missing()

    def count_missing(self) -> None:
        self.num_missing = sum(map(self.expects, self.members))

    def add(self, worker: VirtualWorker, effect: Collective, on_answer: OnAnswer) -> None:
        sent = signature(effect)
        if not self.arrived:
            self.signature = sent
        elif sent != self.signature:
            check_fits(self.method, *self.first(), worker.rank, effect)
        # A worker that joined with its peer's last rounds may arrive without being expected.
        self.num_missing -= self.expects(worker)
        self.arrived[worker.rank] = (worker, effect, on_answer)
        worker.last_rounds[self.topic] = self.round

    def first(self) -> tuple[int, Collective]:
        """Return the rank that arrived first, and its effect."""
        worker, effect, _ = next(iter(self.arrived.values()))
        return worker.rank, effect

    def remove(self, rank: int) -> None:
        """Drop the contribution of a worker that died."""
        self.arrived.pop(rank, None)
        self.count_missing()

    def complete(self) -> None:
        """Answer those who have arrived. Called once, when nobody is missing or nobody else will come."""
        raise NotImplementedError


MakeRendezvous = Callable[[Collective, tuple[VirtualWorker, ...], str], Rendezvous]
"""``make(effect, members, part)`` returns the rendezvous that ``part`` of a member opens with ``effect``."""


class RendezvousTable:
    """All open rendezvous. Completes them when nobody is missing."""

    def __init__(self, workers: list[VirtualWorker], make: MakeRendezvous, method: str) -> None:
        """``method``: the name of the method, for errors."""
        self.workers, self.make, self.method = workers, make, method
        self._everybody = tuple(workers)
        self._open: dict[tuple[str, Group], dict[int, Rendezvous]] = {}
        """By topic and group, then by round."""
        self._left_over: list[Rendezvous] = []
        self._has_joins = False
        """A worker has joined since the beginning."""
        self._known_groups: dict[tuple[int, ...], tuple[VirtualWorker, ...]] = {}

    def arrive(self, worker: VirtualWorker, effect: Collective, on_answer: OnAnswer, part: str) -> Rendezvous:
        """Add the contribution of ``worker``, which its generator ``part`` yielded, to its rendezvous."""
        group = None if isinstance(effect, Shift) else effect.group
        members = self._everybody if group is None else self._members(worker, effect, group, part)
        rounds = self._open.setdefault((effect.topic, group), {})
        self._check_round(worker, effect, part, rounds)
        rendezvous = rounds.get(effect.round)
        if rendezvous is None:
            self._check_members(worker, effect, members, group)
            rendezvous = rounds[effect.round] = self.make(effect, members, part)
        elif rendezvous.part != part:
            rendezvous.part = ""
        rendezvous.add(worker, effect, on_answer)
        worker.own_last_rounds[effect.topic] = (effect.round, group)
        if rendezvous.num_missing <= 0:
            self._close(rendezvous, (effect.topic, group))
            rendezvous.complete()
        return rendezvous

    def open(self) -> Iterator[Rendezvous]:
        for rounds in self._open.values():
            yield from rounds.values()

    def on_membership_change(self, left: int | None = None) -> None:
        """After worker ``left`` died or another joined, complete every rendezvous that misses nobody any more."""
        self._has_joins |= left is None
        for key, rounds in list(self._open.items()):
            for rendezvous in list(rounds.values()):
                if left is None:
                    rendezvous.count_missing()
                else:
                    rendezvous.remove(left)
                if rendezvous.num_missing <= 0:
                    self._close(rendezvous, key)
                    if rendezvous.arrived:
                        rendezvous.complete()

    def end_training(self) -> None:
        """Set the open rendezvous apart: nobody will arrive in them any more. The rounds of all topics begin anew."""
        self._left_over = list(self.open())
        self._open.clear()
        for worker in self.workers:
            worker.last_rounds.clear()
            worker.own_last_rounds.clear()

    def complete_left_over(self) -> bool:
        """Complete what ``end_training`` has set apart with those who had arrived. Return False if there is nothing."""
        left_over, self._left_over = self._left_over, []
        for rendezvous in left_over:
            rendezvous.is_open = False
            rendezvous.complete()
        return bool(left_over)

    def _close(self, rendezvous: Rendezvous, key: tuple[str, Group]) -> None:
        rendezvous.is_open = False
        rounds = self._open[key]
        del rounds[rendezvous.round]
        if not rounds:
            del self._open[key]

    def _members(
        self, worker: VirtualWorker, effect: Collective, group: tuple[int, ...], part: str
    ) -> tuple[VirtualWorker, ...]:
        members = self._known_groups.get(group) if isinstance(group, tuple) else None
        if members is None:
            ascending = list(range(len(self.workers)))
            if not isinstance(group, tuple) or [rank for rank in ascending if rank in group] != list(group):
                raise self._error(
                    worker, effect, part, f"in group {group!r}: expected a tuple of ranks in ascending order"
                )
            members = self._known_groups[group] = tuple(self.workers[rank] for rank in group)
        if worker not in members:
            raise self._error(worker, effect, part, "in which it is not: yield it on the members only")
        return members

    def _check_round(self, worker: VirtualWorker, effect: Collective, part: str, rounds: dict[int, Rendezvous]) -> None:
        """Raise ``MethodError`` if this worker is not to arrive in that round now."""
        number, (last, _) = effect.round, worker.own_last_rounds.get(effect.topic, NO_ROUND)
        if number <= last:
            after = f"after round {last}" if last >= 0 else "as its first"
            raise self._error(
                worker, effect, part, f"{after}: the rounds of a topic ascend from 0; use another topic beside it"
            )
        for open_round, rendezvous in rounds.items():
            same_kind = rendezvous.kind is type(effect)
            if (open_round < number and rendezvous.expects(worker)) or (open_round == number and not same_kind):
                rank, theirs = rendezvous.first()
                now = f"round {number}" if same_kind else text(effect)
                raise self._mismatch(f"worker {rank} waits in {text(theirs)}", worker, now)

    def _check_members(
        self, worker: VirtualWorker, effect: Collective, members: tuple[VirtualWorker, ...], group: Group
    ) -> None:
        """Raise ``MethodError`` if a member has been in this round with another group, or has passed it.

        Once a worker has joined, it may come to rounds that others have completed without it.
        """
        topic, number = effect.topic, effect.round
        for member in members:
            last, its_group = member.own_last_rounds.get(topic, NO_ROUND)
            passed = last > number and not self._has_joins
            if member.alive and (passed or (last == number and its_group != group)):
                arrived = (one for one in self.open() if one.topic == topic and member.rank in one.arrived)
                place = next((f"waits in {text(one.effect)}" for one in arrived), f"is in round {last}")
                raise self._mismatch(f"worker {member.rank} {place}", worker, text(effect))

    def _mismatch(self, other: str, worker: VirtualWorker, now: str) -> MethodError:
        return MethodError(
            f"method {self.method}: {other}, worker {worker.rank} is in {now}: all members must yield the same "
            "collectives in the same order"
        )

    def _error(self, worker: VirtualWorker, effect: Collective, part: str, what: str) -> MethodError:
        return MethodError(f"{part} of method {self.method} on worker {worker.rank} yielded {text(effect)} {what}")
