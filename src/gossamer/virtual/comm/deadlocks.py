"""Finds workers that wait for each other for ever, because their methods yielded different collectives.

A generator that waits in a collective goes on when the missing members arrive, through the generator that yields this
collective. So it goes on if none of theirs is stuck. Generators that never meet this condition wait for each other, or
for a generator that has ended or has passed the round.

Looking at all workers takes time in proportion to their number, so it happens once in several times as many waits, and
whenever no worker computes.
"""

from __future__ import annotations

from gossamer.effects import Shift
from gossamer.errors import MethodError
from gossamer.virtual.comm.messages import text
from gossamer.virtual.comm.rendezvous import Rendezvous
from gossamer.virtual.sim.virtual_worker import Coroutine, VirtualWorker

Part = tuple[int, str]
"""A generator of a worker: the rank, and ``step``, ``background`` or ``finish``."""

WAITS_PER_WORKER = 8
"""Waits, divided by the number of workers, after which the next look is due."""


class DeadlockDetector:
    def __init__(self, workers: list[VirtualWorker], method: str) -> None:
        """``method``: the name of the method, for errors."""
        self.workers, self.method = workers, method
        self.num_alive = len(workers)
        self.num_waiting_steps = 0
        """Workers whose step waits for an answer."""
        self.is_finishing = False
        self._num_waits = 0

    def on_membership_change(self) -> None:
        self.num_alive = sum(worker.alive for worker in self.workers)

    def wait(self, coroutine: Coroutine, rendezvous: Rendezvous | None) -> None:
        """Note that a coroutine waits for an answer: of this collective, or of a ``Swap``."""
        coroutine.waits_in = rendezvous
        if coroutine.name == "step":
            self.num_waiting_steps += 1
        if rendezvous is None or not rendezvous.is_open or self.is_finishing:
            return
        self._num_waits += 1
        if self._num_waits > WAITS_PER_WORKER * len(self.workers) or self.num_waiting_steps >= self.num_alive:
            self.check()

    def go_on(self, coroutine: Coroutine) -> None:
        """Note that a coroutine has its answer, or is closed while it waits."""
        coroutine.waits_in = None
        if coroutine.name == "step":
            self.num_waiting_steps -= 1

    def check(self) -> None:
        """Raise ``MethodError`` if workers wait for each other for ever."""
        self._num_waits = 0
        stuck, blockers = self._stuck()
        for part, coroutine in stuck.items():
            if coroutine.waits_in is not None:
                raise self._error(coroutine, coroutine.waits_in, blockers[part], stuck)

    def _stuck(self) -> tuple[dict[Part, Coroutine], dict[Part, VirtualWorker]]:
        """Return the coroutines that never go on, and for each a worker that keeps it from going on."""
        stuck = {}
        for worker in self.workers:
            for coroutine in worker.coroutines:
                waits_in = coroutine.waits_in
                if _waits_for_steps(coroutine) if waits_in is None else waits_in.is_open:
                    stuck[worker.rank, coroutine.name] = coroutine
        while stuck:
            blockers = self._blockers(stuck)
            if len(blockers) == len(stuck):
                return stuck, blockers
            stuck = {part: stuck[part] for part in blockers}
        return {}, {}

    def _blockers(self, stuck: dict[Part, Coroutine]) -> dict[Part, VirtualWorker]:
        """Return for each coroutine the worker that keeps it from going on, if there is one and ``stuck`` never do."""
        by_rendezvous: dict[int, VirtualWorker | None] = {}
        found = {}
        for part, coroutine in stuck.items():
            rendezvous, worker = coroutine.waits_in, coroutine.worker
            if rendezvous is None:
                blocker = worker if (worker.rank, "step") in stuck else None
            elif rendezvous.kind is Shift:
                blocker = _blocker(rendezvous, worker.rank, stuck)
            else:
                key = id(rendezvous)
                if key not in by_rendezvous:
                    by_rendezvous[key] = _blocker(rendezvous, worker.rank, stuck)
                blocker = by_rendezvous[key]
            if blocker is not None:
                found[part] = blocker
        return found

    def _error(
        self, coroutine: Coroutine, rendezvous: Rendezvous, blocker: VirtualWorker, stuck: dict[Part, Coroutine]
    ) -> MethodError:
        theirs = stuck.get((blocker.rank, rendezvous.part))
        if theirs is not None and theirs.waits_in is not None:
            doing = f"waits in {text(theirs.waits_in.effect)}"
        elif theirs is not None:
            doing = "waits for steps that it cannot do"
        elif _has_ended(blocker, rendezvous.part):
            doing = f"has ended its {rendezvous.part}"
        else:
            doing = f"is in {_place(blocker, rendezvous)}"
        return MethodError(
            f"method {self.method}: worker {coroutine.worker.rank} waits in {text(rendezvous.effect)}, worker "
            f"{blocker.rank} {doing}: all members must yield the same collectives in the same order"
        )


def _place(worker: VirtualWorker, rendezvous: Rendezvous) -> str:
    """Describe where a worker is that does not come to a rendezvous any more."""
    for coroutine in worker.coroutines:
        if coroutine.name == rendezvous.part and coroutine.waits_in is not None:
            return text(coroutine.waits_in.effect)
    return f"round {worker.last_rounds.get(rendezvous.topic)}"


def _waits_for_steps(coroutine: Coroutine) -> bool:
    return any(waiting is coroutine for _, waiting in coroutine.worker.waiting_for_steps)


def _blocker(rendezvous: Rendezvous, rank: int, stuck: dict[Part, Coroutine]) -> VirtualWorker | None:
    """Return a worker that never arrives in a rendezvous in which worker ``rank`` waits for it."""
    if not rendezvous.part:
        return None
    for other in rendezvous.awaited(rank):
        if (other.rank, rendezvous.part) in stuck or _has_ended(other, rendezvous.part):
            return other
    return _passed(rendezvous)


def _has_ended(worker: VirtualWorker, part: str) -> bool:
    """Whether a generator that runs only once has ended. Steps follow each other."""
    return part != "step" and all(coroutine.name != part for coroutine in worker.coroutines)


def _passed(rendezvous: Rendezvous) -> VirtualWorker | None:
    """Return a member that was expected in this round and has gone on to a later one, with another group."""
    if len(rendezvous.missing()) == rendezvous.num_missing:
        return None
    for worker in rendezvous.members:
        last = worker.last_rounds.get(rendezvous.topic, -1)
        if worker.alive and worker.rank not in rendezvous.arrived and last >= rendezvous.round:
            return worker
    return None
