"""Drives a method on one rank of a replica: its background part goes on at boundaries."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gossamer.effects import Effect, MethodGenerator, Swap, WaitSteps
from gossamer.errors import InputError
from gossamer.methods.loading.method_contract import check_effect
from gossamer.process.collectives.membership import ASYNC, BACKGROUND
from gossamer.process.events import EventKind
from gossamer.process.lifecycle import CommAborted, StepRetry, TrainingEnded
from gossamer.process.pairwise.exchanges import PairwiseExchanges
from gossamer.process.replica.agreement import AGREE_S, MEMBERS_MODULUS, Agreement
from gossamer.process.replica.background import (
    COMPLETED,
    END,
    ENDED,
    GO_ON,
    LOST,
    AtBoundary,
    Compare,
    Decide,
    Decision,
    Move,
    Moved,
    Rebuild,
    Request,
    Row,
    TakeState,
    run_background,
)
from gossamer.process.replica.boundary import Boundary
from gossamer.process.replica.effects import ReplicaEffectHandler
from gossamer.process.replica.exchanges import ReplicaExchanges
from gossamer.process.replica.state import ReplicaState
from gossamer.process.runtime.driver import Driver
from gossamer.process.runtime.effect_handler import EffectHandler
from gossamer.process.runtime.partition_policy import PartitionPolicy
from gossamer.process.runtime.process_worker import MergeRecorder
from gossamer.process.runtime.worker_state import WorkerState
from gossamer.vectors.copies import Copies

ROW_WIDTH = 6
"""Numbers that ranks tell each other at once, at most."""

CHANNEL = f"{ASYNC} background"
"""Of collectives. It is not the one that rebuilds the membership, so that no shard does so alone."""


class ReplicaDriver(Driver):
    def __init__(self, state: WorkerState, effects: EffectHandler, policy: PartitionPolicy, replica: Agreement) -> None:
        super().__init__(state, effects, policy)
        assert isinstance(state, ReplicaState)
        assert isinstance(effects.exchanges, ReplicaExchanges)
        self._frozen, self._exchanges, self._compares = state, effects.exchanges, replica.background
        replica.copies = self._exchanges.copies = Copies(state.flat_model.model, replica.size)
        self.boundary = self._exchanges.boundary = Boundary(replica.watch, self.lifecycle, self._exchanges.give)
        replica.watch.on_loss = self._leave_others
        replica.watch.start()
        self._merges = MergeRecorder(self.worker)
        self._resumed_at = 0
        """How many steps this worker had done when the method went on."""
        self._rebuild_until = float("inf")

    # The thread that hears of a dead rank

    def _leave_others(self, text: str) -> None:
        """Another rank of this replica is dead: the other replicas need not wait until this process has ended."""
        self.state.events.add(EventKind.DIED, text)
        self._exchanges.close()
        self.effects.groups.disconnect()
        # The port at which this worker listens, and its heartbeats.
        self._exchanges.heartbeats.store.close()

    # The training thread

    def _gradient_is_there(self) -> None:
        self.worker.num_pending = 1
        if self.background_started:
            self.boundary.step_s = self.worker.step_s
            self.boundary.close(self.worker.step)

    def _step_ends(self) -> None:
        self.worker.num_pending = 0 if self._void else 1
        if self.background_started:
            self.boundary.cross(self.worker.step)

    def serve(self, until: Callable[[], bool]) -> None:
        if self.background_started:
            self.boundary.serve(until)
        else:
            super().serve(until)

    def _join_background(self, timeout_s: float) -> None:
        thread, deadline = self._thread, time.monotonic() + timeout_s
        if thread is not None:
            self.boundary.serve(lambda: not thread.is_alive() or time.monotonic() > deadline, agreed=False)

    # The background thread

    def _run_background(self) -> None:
        if self.flat_model.device.type == "cuda":
            torch.cuda.set_device(self.flat_model.device)
        requests, answer = run_background(self), None
        try:
            while True:
                answer = self._answer(requests.send(answer))
        except (TrainingEnded, StopIteration):
            pass
        except BaseException as error:
            # The next step, or the end, raises it: nobody would see it here.
            self._error = error
        finally:
            requests.close()

    def _answer(self, request: Request) -> Any:
        if isinstance(request, AtBoundary):
            return self.boundary.run_at(request.act)
        if isinstance(request, Compare):
            # Those of what was lost are shorter, and the ranks must send as much as each other.
            row = torch.zeros(ROW_WIDTH, dtype=torch.float64)
            row[: len(request.row)] = torch.tensor(request.row, dtype=torch.float64)
            return [tuple(each.tolist()) for each in self._compares.gather(row)]
        if isinstance(request, Decide):
            return self._decide(request)
        if isinstance(request, TakeState):
            return self._exchanges.take(request.decision)
        if isinstance(request, Rebuild):
            return self._rebuild()
        return self._move(request)

    def _decide(self, request: Decide) -> Decision:
        if not self.boundary.is_first:
            return self.boundary.hear_decision()
        effect = request.effect
        if isinstance(effect, WaitSteps):
            try:
                # The step whose gradient comes next counts at the boundary.
                self.effects.wait_steps(self._resumed_at + effect.count - 1)
                decision = Decision(GO_ON)
            except TrainingEnded:
                decision = Decision(END)
        else:
            decision = self._exchanges.decide(effect)
        self.boundary.tell(decision)
        return decision

    def _move(self, request: Move) -> Moved:
        """Do this rank's part of an exchange or a collective."""
        if isinstance(request.effect, Swap):
            return self._exchanges.move(request.effect, request.decision)
        answer, code = None, COMPLETED
        try:
            answer = self.effects.answer(request.effect, CHANNEL)
        except (StepRetry, CommAborted):
            code = LOST
        except TrainingEnded:
            code = ENDED
        return Moved(self._row(code), answer)

    def _row(self, code: int, *values: int) -> Row:
        """Return what came of a collective, which must be the same on all ranks to count."""
        members = sum(1 << rank for rank in self.effects.groups.train.members) % MEMBERS_MODULUS
        # A float64 holds whole numbers up to 2^53.
        return (code, members >> 32, members & 0xFFFFFFFF, *values)

    def _rebuild(self) -> Moved:
        of, code = self.effects.groups.train, LOST
        now = time.monotonic()
        if now > self._rebuild_until:
            raise InputError(
                f"the ranks of this replica ({self._compares.ranks}) have not agreed on the same members for "
                f"{AGREE_S:.0f} s: it ends, and the other replicas go on; restart the whole replica"
            )
        self._rebuild_until = min(self._rebuild_until, now + AGREE_S)
        self.state.taken_from = None
        try:
            of.request(of.generation + 1)
            of.rebuild(BACKGROUND)
            code = COMPLETED
        except StepRetry:
            code = COMPLETED
        except TrainingEnded:
            code = ENDED
        taken = self.state.taken_from
        return Moved(self._row(code, -1 if taken is None else taken, self.state.taken_at if taken is not None else 0))

    # The part of the replica's state that this rank has (``background.Part``)

    def start(self) -> MethodGenerator:
        return self._generator("background")

    def resume(self, generator: MethodGenerator, answer: Any) -> Effect | None:
        self._resumed_at = self.worker.step + self.worker.num_pending
        with self.lock, self._merges.resume(answer):
            try:
                effect = generator.send(answer)
            except StopIteration:
                return None
        check_effect(self.method, "background", effect)
        self._merges.requested(effect)
        return effect

    def judge(self, decision: Decision, rows: Sequence[Row]) -> bool:
        return self._exchanges.judge(decision, rows)

    def take_over(self, state: Any) -> None:
        peer, tensors, rest = state
        reason = "our weights were not finite or absurdly large" if self.state.nonfinite else "joined"
        self.state.import_state(tensors, rest)
        # The next gradient is taken at these weights already.
        self.state.stale_gradient = False
        self._exchanges.pairing.needs_state = False
        self.state.events.add(EventKind.TOOK_OVER, f"{reason}: took over the weights of worker {peer}", peer)

    @property
    def owns_membership(self) -> bool:
        return not self.method.lockstep

    def freeze(self) -> None:
        self._frozen.freeze()

    def thaw(self) -> None:
        self._rebuild_until = float("inf")
        self._frozen.thaw()


def worker_classes(replica: Agreement | None) -> tuple[type[WorkerState], type[PairwiseExchanges], type[EffectHandler]]:
    """Return the classes of which a worker consists, or a rank of a replica."""
    if replica is None:
        return WorkerState, PairwiseExchanges, EffectHandler
    return ReplicaState, ReplicaExchanges, ReplicaEffectHandler


def make_driver(
    state: WorkerState, effects: EffectHandler, policy: PartitionPolicy, replica: Agreement | None
) -> Driver:
    """Return the driver of a worker, or of a rank of a replica."""
    return Driver(state, effects, policy) if replica is None else ReplicaDriver(state, effects, policy, replica)
