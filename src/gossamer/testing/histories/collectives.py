"""Collectives of simulated workers: they complete if all members of a view come, and break if one leaves or dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gossamer.process.state.lineage import ViewId
from gossamer.process.views.messages import View

if TYPE_CHECKING:
    from gossamer.testing.histories.trainer import Trainer
    from gossamer.testing.histories.world import World

MAX_DELAY_S = 0.02


class Entry(NamedTuple):
    """One member in a collective."""

    trainer: Trainer
    value: Any


class Collective:
    def __init__(self, purpose: int, what: str, number: int, view: View) -> None:
        self.purpose, self.what, self.view = purpose, what, view
        self.name = purpose, view.id, what, number
        self.entries: dict[int, Entry] = {}
        self.values: dict[int, Any] | None = None
        """Of all members, once all have come: whoever does not die, break or lose its connection now gets them."""


class Collectives:
    """All collectives, seen from above. No worker knows more of them than its own part."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[tuple[int, ViewId, str, int], Collective] = {}
        self._left: dict[tuple[int, ViewId], set[int]] = {}
        """Members that have closed their connections in a view."""
        self._lists: dict[tuple[int, ViewId], View] = {}

    def check(self, purpose: int, view: View) -> None:
        """No two lists of members have one name."""
        if self._lists.setdefault((purpose, view.id), view) != view:
            self._world.violate(
                f"two views are called {tuple(view.id)}: {self._lists[purpose, view.id].ranks}, {view.ranks}"
            )

    def enter(self, trainer: Trainer, what: str, number: int, view: View, value: Any) -> Collective:
        """A member comes to a collective: the same for all members that give it the same name."""
        made = Collective(trainer.purpose, what, number, view)
        collective = self._open.setdefault(made.name, made)
        collective.entries[trainer.rank] = Entry(trainer, value)
        if any(self._connected(trainer.rank, rank) for rank in self._away(collective)):
            self._break_later(collective, trainer)
        self.try_to_complete(collective)
        return collective

    def try_to_complete(self, collective: Collective) -> None:
        if collective.values is None:
            if len(collective.entries) < len(collective.view.members):
                return
            ranks = collective.view.ranks
            if self._world.network.down and not all(self._connected(one, other) for one, other in _pairs(ranks)):
                return
            collective.values = {rank: entry.value for rank, entry in collective.entries.items()}
            self._open.pop(collective.name, None)
        for trainer, _ in collective.entries.values():
            self._later(trainer, partial(self._deliver, collective, trainer))

    def _deliver(self, collective: Collective, trainer: Trainer) -> None:
        values = collective.values
        if trainer.waits_in is not collective or values is None:
            return
        if self._world.network.down and not all(self._connected(trainer.rank, rank) for rank in collective.view.ranks):
            return
        if self._away(collective) - {trainer.rank} and self._world.rng.random() < 0.5:
            trainer.broken(collective)
        else:
            trainer.completed(collective, values)

    def leave(self, purpose: int, view: View, rank: int) -> None:
        """A member closes its connections in a view, or its process has ended: who waits for it notices if it can."""
        left = self._left.setdefault((purpose, view.id), set())
        if rank in left:
            return
        left.add(rank)
        for collective in self._open.values():
            if collective.name[:2] == (purpose, view.id):
                for other, (trainer, _) in collective.entries.items():
                    if other != rank and self._connected(rank, other):
                        self._break_later(collective, trainer)

    def withdraw(self, collective: Collective, rank: int) -> None:
        """A member does not wait in a collective any more."""
        collective.entries.pop(rank, None)
        if not collective.entries:
            self._open.pop(collective.name, None)

    def _away(self, collective: Collective) -> set[int]:
        """Return the members that have closed their connections, or whose processes have ended."""
        world, away = self._world, set(self._left.get(collective.name[:2], ()))
        for member in collective.view.members if world.gone else ():
            process = world.processes.get(member.rank)
            if process is None or process.number != member.process:
                away.add(member.rank)
        return away

    def _connected(self, one: int, other: int) -> bool:
        down = self._world.network.down
        return (one, other) not in down and (other, one) not in down

    def _break_later(self, collective: Collective, trainer: Trainer) -> None:
        self._later(trainer, lambda: trainer.broken(collective) if trainer.waits_in is collective else None)

    def _later(self, trainer: Trainer, call: Callable[[], None]) -> None:
        world = self._world
        world.queue.at(world.now + MAX_DELAY_S * world.rng.random(), lambda: world.do(trainer.process, call))


def _pairs(ranks: list[int]) -> Iterator[tuple[int, int]]:
    return ((one, other) for at, one in enumerate(ranks) for other in ranks[:at])
