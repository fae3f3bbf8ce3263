"""The end of a run: the method's ``finish``, then one exact average over all workers.

If a worker is lost or comes back in the middle of it, the others agree on a new generation and start again. Each
worker has a *standing*: whether its weights count at all. One that already has the final average gives it to the
others. How much each worker counts follows from when it did its steps (``step_history``).
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from gossamer.process.averages.model_average import (
    COUNTS,
    EXCLUDED,
    HAS_AVERAGE,
    ModelCopy,
    average_models,
    gather_shares,
)
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.membership import FOREGROUND
from gossamer.process.events import EventKind
from gossamer.process.joining.join_facts import name_ranks
from gossamer.process.lifecycle import StepRetry, TrainingEnded
from gossamer.process.runtime.worker_runtime import WorkerRuntime

POLL_S = 0.01
WAIT_S = 0.1
"""How long a worker waits for the others before it looks whether it has to start again."""

HOST_LEAVES_AFTER_S = 0.5
"""How long the host of the store, and the member that the others ask, wait for the others to leave first."""


class FinalAverage:
    def __init__(self, runtime: WorkerRuntime) -> None:
        self.runtime, self.rank, self.store = runtime, runtime.rank, runtime.store
        self.groups, self.of = runtime.groups, runtime.groups.finish
        self._standing = EXCLUDED
        self._method_finished = False
        """The method's ``finish`` has begun here: it cannot be repeated."""
        self._own: Tensor | None = None
        """In a replica: this rank's part of the weights before the average."""

    def run(self) -> None:
        """Run until the average is complete on every worker alive."""
        self._take_unseen_weights()
        flat_model = self.runtime.flat_model
        if self.runtime.state.replica is not None:
            self._own = flat_model.x.to("cpu", copy=True)
        while not self._attempt():
            pass
        flat_model.load_weights(flat_model.x)
        if len(self.runtime.everybody) > 1 and self.of.members == [self.rank]:
            text = "no other worker is left to average with: the final model is this worker's own"
            self.runtime.state.events.add(EventKind.NOT_AVERAGED, text)
        self._say_missing()

    def _say_missing(self) -> None:
        """Say which workers are not in the average. They may train on, on the other side of a partition."""
        members = self.of.members or [self.rank]
        self.runtime.missing = missing = [rank for rank in self.runtime.everybody if rank not in members]
        if missing:
            text = f"the final model is without {name_ranks(missing)}: died, left or cannot be reached"
            self.runtime.state.events.add(EventKind.MISSING, text, missing[0])

    def _take_unseen_weights(self) -> None:
        """Average the weights that the model has, if it was trained without a step that this worker saw.

        Otherwise the average would replace them by those from before the training.
        """
        flat_model, state = self.runtime.flat_model, self.runtime.state
        if flat_model.two_vectors and not state.history.steps and not torch.equal(flat_model.weights, flat_model.x):
            flat_model.x.copy_(flat_model.weights)
            state.history.touch(time.monotonic())

    def _attempt(self) -> bool:
        """Return False if the membership changed in the middle of it."""
        try:
            if not self._begin():
                self._method_finished = True
                self._finish_method()
            self._average()
            self._standing = HAS_AVERAGE
            self._measure_distance()
            self._wait_for_others()
            self._leave()
        except StepRetry:
            return False
        except TrainingEnded:
            pass
        return True

    def _begin(self) -> bool:
        """Agree on the members; return whether the method's ``finish`` has begun on one of them."""

        def begin() -> bool:
            self.of.begin()
            # The first message: if the connections fail, nobody has begun yet and all can start again.
            flag_of_ours = (torch.tensor([int(self._method_finished)]),)
            begun = self.groups.gather(self.of, FOREGROUND, flag_of_ours, Call("Gather", "begun", 0))
            return any(int(flag) for (flag,) in begun)

        replica = self.runtime.state.replica
        return begin() if replica is None else not replica.all_true(not replica.whole(self.of, begin))

    def _finish_method(self) -> None:
        """Run the method's ``finish``. In its means each worker counts as in the average that follows."""
        state, of = self.runtime.state, self.of
        if state.method.finish is not None:
            standing = EXCLUDED if state.needs_state else COUNTS
            shares = gather_shares(self.groups, of, "shares", self.runtime.flat_model.x, state, standing)
            self.runtime.driver.finish_method(of, shares.weights[of.members.index(self.rank)])

    def _average(self) -> None:
        """Average weights and buffers over the workers whose weights count."""
        flat_model, state = self.runtime.flat_model, self.runtime.state
        own = ModelCopy.of(flat_model)
        if self._standing != HAS_AVERAGE:
            self._standing = COUNTS if own.is_finite(flat_model) and not state.needs_state else EXCLUDED
        average = average_models(self.groups, self.of, "final", own, state, self._standing)
        flat_model.x.copy_(average.x)
        average.load_buffers(flat_model)

    def _measure_distance(self) -> None:
        """In a replica: say how far the average has moved it. Its ranks have just agreed that all have it."""
        replica, own = self.runtime.state.replica, self._own
        if replica is not None and own is not None:
            self.runtime.metrics.consensus = replica.distance(own, self.runtime.flat_model.x.to("cpu"))

    def _wait_for_others(self) -> None:
        """Wait until every member has the average. The ranks of a replica start again, or leave, together."""
        replica = self.runtime.state.replica
        if replica is None:
            self._wait_for_members()
        else:
            replica.whole(self.of, self._wait_for_members)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.of.members if rank != self.rank]

    def _wait_for_members(self) -> None:
        of, heartbeats, others = self.of, self.runtime.heartbeats, self._others
        while True:
            if of.requested > of.generation:
                raise StepRetry
            have = of.entries.exchange(f"{of.key}/has", "", of.members, WAIT_S)
            if all(rank in have or heartbeats.has_left(rank) or of.agreement.probe_for_lost([rank]) for rank in others):
                break

    def _leave(self) -> None:
        """Leave the run. Who serves the others leaves last."""
        heartbeats, others = self.runtime.heartbeats, self._others
        self.runtime.leave()
        if self.store.hosted_here or self.rank < min(others, default=self.rank):
            until = time.monotonic() + HOST_LEAVES_AFTER_S
            while time.monotonic() < until and not all(
                heartbeats.has_left(rank) or rank in heartbeats.lost for rank in others
            ):
                time.sleep(POLL_S)
