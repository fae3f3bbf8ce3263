"""A small model of what a worker does with the views: it makes steps together with the others, and ends with them.

Its weights are a number that stands for all steps in them, so two models are equal if their numbers are. What it does
when the membership changes is what ``collectives.membership`` and ``state.alignment`` do in real workers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from gossamer.process.liveness.records import Stage
from gossamer.process.state.lineage import ROOT, Head, Lineage, find_heads, merge
from gossamer.process.views.messages import PURPOSES, View
from gossamer.process.views.view_change import ViewChange
from gossamer.testing.histories.collectives import Collective

if TYPE_CHECKING:
    from gossamer.testing.histories.process import Process
    from gossamer.testing.histories.world import World

TRAIN, FINISH = PURPOSES.index("train"), PURPOSES.index("finish")

STUCK_S = 0.5
"""A worker that has been in a collective for this long checks whether the others are still in it."""

LEFT_S = 1.0
"""A worker that has been in a collective for this long does not wait for members that are done."""

LEAVE_GROUPS_AFTER_S = 0.5
"""How long a worker that is done stays in the groups of the others."""


class Phase(IntEnum):
    TRAINING = 0
    DONE = 1
    FINISHING = 2
    LEFT = 3


class Model(NamedTuple):
    lineage: Lineage | None
    """``None``: of a worker that has just been started."""
    weights: int


NO_MODEL = Model(None, 0)


class Trainer:
    """The threads of one process."""

    def __init__(self, world: World, process: Process, batches: int, step_s: float) -> None:
        self.world, self.process, self.rank = world, process, process.rank
        self.batches, self.step_s = batches, step_s
        self.phase = Phase.TRAINING
        self.model = NO_MODEL
        self.view: View | None = None
        self.aligned = False
        """Whether this worker has the model of its view."""
        self.waits_in: Collective | None = None
        self.waits_since = 0.0
        self.num_steps = 0
        self.num_in_view = 0
        self.progress_at = world.now
        self.final: int | None = None
        """The weights of the final average."""
        self._has: View | None = None

    @property
    def purpose(self) -> int:
        return FINISH if self.phase >= Phase.FINISHING else TRAIN

    @property
    def _machine(self) -> ViewChange:
        return self.process.views[self.purpose]

    def start(self) -> None:
        if self.world.has_started:
            # It comes back: the others must let it in.
            train = self.process.views[TRAIN]
            train.request(train.requested + 1)
        self.process.views[TRAIN].enter()

    # Views

    def installed(self, purpose: int, view: View) -> None:
        self.world.collectives.check(purpose, view)
        if purpose != self.purpose or self.phase in (Phase.DONE, Phase.LEFT):
            return
        self.view, self.num_in_view, self.aligned = view, 0, False
        if self.phase == Phase.FINISHING:
            self._wait_in("final", (self.model, self.final))
        else:
            self._wait_in("align", self.model)

    def _rebuild(self) -> None:
        """Give up the view and wait for the next one."""
        self._leave_view()
        self._machine.enter()

    def _leave_view(self) -> None:
        if self.waits_in is not None:
            self.world.collectives.withdraw(self.waits_in, self.rank)
            self.waits_in = None
        if self.view is not None:
            self.world.collectives.leave(self.purpose, self.view, self.rank)
        self.view = None

    # Collectives

    def _wait_in(self, what: str, value: Any) -> None:
        assert self.view is not None
        if self._machine.requested > self.view.id.number:
            self._rebuild()
            return
        self.waits_since = self.world.now
        self.num_in_view += 1
        self.waits_in = self.world.collectives.enter(self, what, self.num_in_view, self.view, value)

    def completed(self, collective: Collective, values: dict[int, Any]) -> None:
        self.waits_in, what = None, collective.what
        self.progress_at = self.world.now
        if what == "align":
            self._align(collective.view, values)
            self.aligned = True
            self.world.has_started = True
            self._compute()
        elif what == "step":
            self._step(collective.view, values)
            self._compute()
        else:
            self._finish(collective.view, values)

    def broken(self, collective: Collective) -> None:
        """A collective is lost: with it the view. The step in progress is repeated in the next one."""
        self.world.num_repeated += collective.what == "step"
        self._machine.request(collective.view.id.number + 1)
        self._rebuild()

    def poll(self) -> None:
        """Look now and then, as the heartbeat thread does."""
        world, collective = self.world, self.waits_in
        if collective is not None:
            world.collectives.try_to_complete(collective)
            waited_s = world.now - self.waits_since
            if self.waits_in is collective and waited_s > STUCK_S:
                self._ask(collective.view)
                if self._is_lost(collective, waited_s):
                    self.broken(collective)
        elif self.phase == Phase.DONE:
            self._finish_if_all_are_done()
        elif self.phase == Phase.FINISHING and self._has is not None:
            self._leave_if_all_have_it()

    def _ask(self, view: View) -> None:
        """Find out whether the others can be reached."""
        self.process.machine.reachability.probe(view.ranks, self.world.now)

    def _is_lost(self, collective: Collective, waited_s: float) -> bool:
        others = [rank for rank in collective.view.ranks if rank != self.rank]
        if self._machine.requested > collective.view.id.number or any(map(self.process.away, others)):
            return True
        left = waited_s > LEFT_S and collective.purpose == TRAIN
        return left and any(self.process.is_done(rank) for rank in others)

    # Steps

    def _compute(self) -> None:
        self.world.later(self.process, self.step_s * self.world.rng.uniform(0.5, 1.5), self._reach)

    def _reach(self) -> None:
        """The gradient is there."""
        if self.phase != Phase.TRAINING or self.view is None or self.waits_in is not None:
            return
        if self.world.enough or self.num_steps >= self.batches:
            self._end_training()
        elif not self.world.may_train(self.process):
            self.world.later(self.process, 0.1, self._reach)
        else:
            self._wait_in("step", self.model)

    def _step(self, view: View, models: dict[int, Model]) -> None:
        if len({model.weights for model in models.values()}) > 1:
            self.world.violate(f"the members of view {tuple(view.id)} make a step from different models")
        lineage = (self.model.lineage or ROOT).after_step(view.id, len(view.members))
        self._set_model(Model(lineage, hash((self.model.weights, view.id, lineage.head_count))))
        self.num_steps += 1
        self.world.num_steps += 1

    def _align(self, view: View, models: dict[int, Model]) -> None:
        """Come to the same model as the other members."""
        heads = self.heads(models)
        if not heads:
            self._set_model(Model(ROOT, 0))
            return
        lineage = merge(heads, view.id, len(view.members))
        weights = [models[head.ranks[0]].weights for head in heads]
        merged = Model(lineage, weights[0] if len(heads) == 1 else hash((view.id, *weights)))
        if self.model.lineage is not None:
            lost = self.model.lineage.work_missing_in([lineage])
            if lost and self.model.lineage.related(lineage):
                self.world.violate(f"worker {self.rank} discards {lost} steps that could have been averaged")
            if lost:
                self.world.num_discarded += lost
                self.world.say(f"worker {self.rank} discards {lost} steps: its model began separately")
        if len(heads) > 1:
            self.world.num_merges += 1
        self._set_model(merged)

    def heads(self, models: dict[int, Model]) -> tuple[Head, ...]:
        """Return the models that are behind no other."""
        known = {rank: model.lineage for rank, model in models.items() if model.lineage is not None}
        return find_heads(known) if known else ()

    def _set_model(self, model: Model) -> None:
        self.world.note_model(self, model)
        self.model = model

    # The end

    def _end_training(self) -> None:
        self.phase, self.progress_at = Phase.DONE, self.world.now
        self.world.disturb([self.rank])
        self.world.say(f"worker {self.rank} is done after {self.num_steps} steps")
        self.process.machine.advance(Stage.DONE)
        self.world.later(self.process, LEAVE_GROUPS_AFTER_S, self.leave_groups)

    def leave_groups(self) -> None:
        """Those who still train notice that this worker takes part no more."""
        if self.phase == Phase.DONE:
            self._leave_view()

    def _finish_if_all_are_done(self) -> None:
        if all(self.process.is_done(rank) for rank in range(self.world.workers) if rank != self.rank):
            self._leave_view()
            self.phase, self.progress_at = Phase.FINISHING, self.world.now
            self._machine.enter()

    def _finish(self, view: View, values: dict[int, tuple[Model, int | None]]) -> None:
        finals = {final for _, final in values.values() if final is not None}
        if len(finals) > 1:
            self.world.say(f"worker {self.rank}: there are {len(finals)} final averages")
        self.final = min(finals) if finals else hash((view.id, *(model.weights for model, _ in values.values())))
        self._has = view
        self.world.has_average.add((view.id, self.rank))

    def _leave_if_all_have_it(self) -> None:
        view, world = self._has, self.world
        assert view is not None
        if self._machine.requested > view.id.number:
            self._has = None
            self._rebuild()
        elif all(world.has_final(self.process, view, rank) for rank in view.ranks):
            self.phase = Phase.LEFT
            world.end(self.process, view)
        else:
            self._ask(view)
