"""What must hold in a history: about who is alive, who is in, and what the training comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossamer.process.liveness.actions import Change, Notice
from gossamer.testing.histories.trainer import Phase, Trainer

if TYPE_CHECKING:
    from gossamer.testing.histories.process import Process
    from gossamer.testing.histories.world import World

SLACK_S = 1.5
"""How much longer than ``Timing`` says it may take until a death is noticed: messages are late and lost."""

PROGRESS_S = 3.0
"""Whoever is alive and connected makes a step at least this often, if nothing happens."""


class Violated(Exception):
    """An invariant does not hold."""


class Invariants:
    """Looks at a world from outside."""

    def __init__(self, world: World) -> None:
        self.world = world

    # Who is alive

    def check_notice(self, process: Process, notice: Notice) -> None:
        """What is said about a worker is true, or was just now."""
        self.world.num_notices += 1
        rank, change = notice.rank, notice.change
        self.world.say(f"worker {process.rank}: worker {rank} {change}")
        known = process.machine.record(rank)
        number = known.process if known is not None else 0
        before, about, at = process.said.get(rank, (Change.RETURNED, 0, 0.0))
        process.said[rank] = (change, number, self.world.now)
        if change == Change.DIED and before == Change.DIED:
            raise Violated(f"worker {process.rank} says twice that worker {rank} died")
        other = self.world.processes.get(rank)
        ended_at = self.world.changed_at[rank]
        # Whoever was stopped has nothing to say about those that were not.
        just_resumed = process.resumed_at == self.world.changed_at[process.rank]
        # And one that was stopped passes on what had waited for it: how the dead were before they died.
        processes = self.world.processes.values()
        may_be_late = just_resumed or any(self.world.now - each.resumed_at < SLACK_S for each in processes)
        if change == before == Change.RETURNED or other is not None or about != number or may_be_late:
            pass
        elif change == Change.RETURNED and at > ended_at > self.world.links_changed_at + self._known_after_s():
            raise Violated(f"worker {process.rank} says that worker {rank} is back, as it was when it died")
        quiet_s = self.world.now - (ended_at if just_resumed else max(ended_at, self.world.changed_at[process.rank]))
        if quiet_s < self._known_after_s():
            return
        there = {each.rank for each in self.world.processes.values() if not each.stopped}
        if change == Change.RETURNED and other is None and not may_be_late:
            raise Violated(f"worker {process.rank} says that worker {rank} is back, which ended {quiet_s:.1f} s ago")
        alive = other is not None and not other.stopped and not other.hung and other.machine.own.process == number
        connected = rank in self.world.network.reachable(process.rank, there)
        others = (at for each, at in self.world.changed_at.items() if each != process.rank or not just_resumed)
        quiet = all(self.world.now - at > self._known_after_s() for at in others)
        if change == Change.DIED and alive and connected and quiet:
            raise Violated(f"worker {process.rank} says that worker {rank} died, which is alive and connected")

    def _known_after_s(self) -> float:
        return self.world.timing.dead_s + SLACK_S

    def check_known(self) -> None:
        """Everybody knows who is alive, and what was requested. To be called if nothing has happened for long."""
        running = {rank for rank, process in self.world.processes.items() if not process.stopped}
        for process in [self.world.processes[rank] for rank in sorted(running)]:
            heard = self.world.network.reachable(process.rank, running)
            # Whoever hangs counts as dead, and of many workers it is told the counters only.
            for rank in () if process.hung else range(self.world.workers):
                self._check_one(process, rank, heard)
            requests = max(self.world.processes[rank].machine.own.requests[0] for rank in heard)
            if process.machine.own.requests[0] < requests and self.world.now - self.world.requested_at > SLACK_S:
                raise Violated(f"worker {process.rank} does not know that generation {requests} is requested")

    def _check_one(self, process: Process, rank: int, heard: set[int]) -> None:
        dead, other, known = process.machine.dead(rank), self.world.processes.get(rank), process.machine.record(rank)
        if rank == process.rank:
            return
        if rank in heard and other is not None and not other.hung:
            if dead or known is None:
                raise Violated(f"worker {process.rank} does not know that worker {rank} is alive")
            if known.process != other.machine.own.process:
                raise Violated(f"worker {process.rank} knows an earlier process of worker {rank} only")
            late = self.world.now - self.world.changed_at[rank] > SLACK_S
            if known.stage != other.machine.own.stage and late:
                raise Violated(f"worker {process.rank} does not know how far worker {rank} is")
        elif not dead and self.world.now - self._heard_at(process, rank) > self._known_after_s():
            raise Violated(f"worker {process.rank} takes worker {rank} for alive")

    def _heard_at(self, process: Process, rank: int) -> float:
        """Return until when a worker may have heard of another one, though the links between them are cut."""
        other, (change, number, at) = self.world.processes.get(rank), process.said.get(rank, (Change.DIED, 0, 0.0))
        if other is None:
            return self.world.changed_at[rank]
        # It may have read in the store, later, that there is a new process, or have heard of it from one that ended.
        told = change == Change.RETURNED and number == other.machine.own.process
        return max(self.world.processes_changed_at, at if told else 0.0)

    # Who is in, and the training

    def running(self) -> list[Trainer]:
        """Return the workers that are neither stopped nor hung."""
        processes = [self.world.processes[rank] for rank in sorted(self.world.processes)]
        return [process.trainer for process in processes if process.trainer and not (process.stopped or process.hung)]

    def check_progress(self) -> None:
        """Whoever is alive and connected makes progress. To be called if nothing has happened for long."""
        trainers = self.running()
        # One that hangs makes no steps, but it passes on what it hears.
        ranks = {rank for rank, process in self.world.processes.items() if not process.stopped}
        for trainer in trainers:
            side = self.world.network.reachable(trainer.rank, ranks)
            if not self.world.may_train(trainer.process):
                continue
            idle_s = self.world.now - trainer.progress_at
            if trainer.phase > Phase.TRAINING:
                others = [other for other in trainers if other.rank in side and other is not trainer]
                if any(other.phase == Phase.TRAINING for other in others):
                    continue
                # Who has ended does not keep the others waiting any more.
                idle_s = min(idle_s, self.world.now - max(self.world.changed_at.values()))
                idle_s = min([idle_s, *(self.world.now - other.progress_at for other in others)])
            if idle_s > PROGRESS_S:
                self.world.violate(f"worker {trainer.rank} has stood still for {idle_s:.1f} s")

    def check_one_model(self) -> None:
        """All workers that train are in one view, and none has a model that is in no other."""
        # Workers that pause because they are too few keep their view.
        running = [trainer for trainer in self.running() if self.world.may_train(trainer.process)]
        training = [trainer for trainer in running if trainer.phase == Phase.TRAINING]
        views = {trainer.view.id for trainer in training if trainer.view is not None}
        if len(views) > 1:
            self.world.violate(f"the network is whole, and there are {len(views)} views")
        models = {trainer.rank: trainer.model for trainer in training}
        heads = training[0].heads(models) if training else ()
        if len(heads) > 1:
            self.world.violate(
                f"the network is whole, and workers {[head.ranks for head in heads]} have different models"
            )

    def check_all_ended(self, ranks: list[int]) -> None:
        """These workers have come to their end, with the same weights."""
        for rank in ranks:
            if rank not in self.world.ended:
                self.world.violate(f"worker {rank} does not come to its end")
        if len({self.world.ended[rank][1:] for rank in ranks}) > 1:
            self.world.violate("workers end with different weights")
