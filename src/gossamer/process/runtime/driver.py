"""Drives a method's generators: its ``step`` inside ``optimizer.step()``, its ``background`` in a thread beside it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Effect, Gather, Mean, Pair, Start, Swap, Ticket, Update, Wait, WaitSteps
from gossamer.methods import Method
from gossamer.process.collectives.groups import Groups
from gossamer.process.collectives.membership import (
    ASYNC,
    BACKGROUND,
    FOREGROUND,
    CommAborted,
    Membership,
    StepRetry,
    TrainingEnded,
)
from gossamer.process.daemon_executor import DaemonExecutor
from gossamer.process.metrics import Metrics
from gossamer.process.pairwise.exchanges import PairwiseExchanges
from gossamer.process.runtime.process_worker import ProcessWorker
from gossamer.process.runtime.staging import Staging
from gossamer.process.runtime.step_call import overflowed, prepare
from gossamer.process.runtime.step_recorder import StepRecorder
from gossamer.process.runtime.worker_state import WorkerState, is_finite
from gossamer.process.thread_priority import PriorityBoost

WAKE_S = 0.1
"""How often a thread that waits for steps looks whether training has stopped."""


class Driver:
    """One worker's method at work."""

    def __init__(
        self,
        state: WorkerState,
        groups: Groups,
        exchanges: PairwiseExchanges,
        staging: Staging,
        counts: Metrics,
        step_recorder: StepRecorder,
    ) -> None:
        self.step_recorder = step_recorder
        self.state, self.method, self.worker = state, state.method, state.worker
        self.flat_model, self.lock = state.flat_model, state.lock
        self.groups, self.exchanges, self.staging, self.counts = groups, exchanges, staging, counts
        self.stopped = False
        """Training has ended, for the background."""
        self.ended = False
        """Nothing is done any more inside ``optimizer.step()``."""
        self._step: Generator[Effect, Any, None] | None = None
        self._void = False
        self._steps_changed = threading.Condition()
        self._async_channel: DaemonExecutor | None = None
        self._thread: threading.Thread | None = None
        self._giving_way = PriorityBoost()
        """The background's thread does."""
        self._hooks = [
            self.flat_model.optimizer.register_step_pre_hook(prepare),
            self.flat_model.optimizer.register_step_pre_hook(lambda *_: self.before_step()),
            self.flat_model.optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]

    # The training thread

    def before_step(self) -> None:
        """The optimizer is about to make its step."""
        if self.ended or overflowed(self.flat_model.optimizer):
            return
        self.abandon_step()
        self.staging.training_here()
        self.start_background()
        self.exchanges.in_step, self._void = True, False
        self.step_recorder.enter_step()
        self._lock_for_training()
        self.flat_model.enter_step()
        if self.state.stale_gradient:
            # This gradient was taken at weights that were not finite; others are in their place by now.
            self.state.stale_gradient, self._void = False, True
            self.flat_model.no_update()
            return
        self._step = self.method.step(self.worker)
        if self._foreground():
            self.flat_model.hand_over()
        else:
            self.flat_model.no_update()

    def abandon_step(self) -> None:
        """Where the optimizer failed in the middle of a step, and the user has caught that, that step is void."""
        if self.exchanges.in_step:
            self._step, self._void = None, True
            self.after_step()

    def after_step(self) -> None:
        """The optimizer has made its step."""
        if not self.exchanges.in_step or self.ended:
            return
        if self._step is not None:
            self.flat_model.updated()
            self._foreground()
        if self.flat_model.two_vectors:
            self.method.eval_point(self.worker, self.flat_model.weights)
        self.flat_model.leave_step()
        if not self._void:
            self.worker.stepped()
            self.counts.steps += 1
        self.lock.release()
        self.step_recorder.leave_step(self._void)
        self.exchanges.in_step = False
        with self._steps_changed:
            self._steps_changed.notify_all()

    def _foreground(self) -> bool:
        """Drive the method's step; True if it asks for the optimizer's update, False if it is over."""
        assert self._step is not None
        merging = _Merging(self.step_recorder, self.worker)
        answer: Any = None
        while True:
            try:
                with merging.of(answer):
                    effect = self._step.send(answer)
            except StopIteration:
                self._step = None
                return False
            if isinstance(effect, Update):
                return True
            merging.asked(effect)
            began = time.monotonic()
            # What is waited for may need the lock on its way.
            self.lock.release()
            try:
                answer = self.answer(effect, FOREGROUND)
            except (StepRetry, TrainingEnded):
                self._step.close()
                self._step = None
                self._void = True
                return False
            finally:
                self._lock_for_training()
                self.counts.idle_s += time.monotonic() - began
                if not isinstance(effect, Start):
                    self.step_recorder.waited(began)

    def _lock_for_training(self) -> None:
        if not self.lock.acquire(blocking=False):
            with self._giving_way.waited_for():
                self.lock.acquire()

    # The background thread

    def start_background(self) -> None:
        """From the first step on: until then a state may be loaded, and nothing of ours travels."""
        if self._thread is None and type(self.method).background is not Method.background:
            self._thread = threading.Thread(target=self._background, name="gossamer-background", daemon=True)
            self._thread.start()

    def _background(self) -> None:
        self._giving_way.begin()
        if self.flat_model.device.type == "cuda":
            torch.cuda.set_device(self.flat_model.device)
        generator = self.method.background(self.worker)
        merging = _Merging(self.step_recorder, self.worker)
        answer: Any = None
        # It ends only where it waits for a next exchange or step: what was agreed on with a peer is done.
        try:
            while True:
                with self.lock, self.staging.beside_training(), merging.of(answer):
                    effect, answer = generator.send(answer), None
                merging.asked(effect)
                try:
                    answer = self.answer(effect, BACKGROUND)
                except StepRetry:
                    generator.close()
                    generator, answer = self.method.background(self.worker), None
        except (TrainingEnded, StopIteration):
            pass
        finally:
            generator.close()
            self._giving_way.end()

    @property
    def started(self) -> bool:
        """Whether the background is at work, or has been."""
        return self._thread is not None

    # Both

    def answer(self, effect: Effect, channel: str, of: Membership | None = None, begun: int | None = None) -> Any:
        """Do what a method asks for, except for updates; in no other generation than ``begun``, if given."""
        of = of or self.groups.train
        if isinstance(effect, WaitSteps):
            return self._await_steps(self.worker.step + effect.count)
        if isinstance(effect, Mean):
            return self._mean(effect, channel, of, begun)
        if isinstance(effect, Gather):
            return self._gather(effect, channel, of)
        if isinstance(effect, Pair):
            return self.exchanges.pair(effect)
        if isinstance(effect, Swap):
            return self.exchanges.swap(effect)
        if isinstance(effect, Start):
            if self._async_channel is None:
                self._async_channel = DaemonExecutor("gossamer-courier")
            ticket = Ticket(effect.effect, since_step=self.worker.step)
            errand = partial(self.answer, effect.effect, ASYNC, of, of.generation)
            self.state.under_way[ticket] = self._async_channel.submit(errand)
            return ticket
        assert isinstance(effect, Wait)
        try:
            return self.state.under_way.pop(effect.ticket).result()
        except CommAborted:
            if of is self.groups.train:
                self.groups.train.regroup(FOREGROUND)
            raise StepRetry from None

    def _await_steps(self, target: int) -> None:
        with self._steps_changed:
            while self.worker.step < target and not self.stopped:
                self._steps_changed.wait(WAKE_S)
        if self.stopped:
            raise TrainingEnded

    def _mean(self, effect: Mean, channel: str, of: Membership, begun: int | None) -> Tensor:
        with self.staging.sending(channel, effect.vector) as (vector,):
            # A method is through with one answer before it asks for the next of its kind: one buffer serves them all.
            out = None if vector.is_cuda else self.staging.host_buffer(f"{channel} {effect.topic} mean", vector)
            mean, members = self.groups.mean(of, channel, vector, effect.group, out, begun)
            self._account(members, 2 * (members - 1) / members, vector)
            self._note(of, channel, f"{effect.topic}/{effect.round}", 2 * (members - 1) / members, vector)
            if members > 1 and not is_finite(mean):
                # All members see it: once more, without those whose vectors are to blame.
                counts = is_finite(vector)
                share = vector.new_ones(1) if counts else vector.new_zeros(1)
                extended = torch.cat((vector if counts else torch.zeros_like(vector), share))
                among, _ = self.groups.mean(of, channel, extended, effect.group, begun=begun)
                if among[-1] > 0:
                    mean = torch.div(among[:-1], among[-1], out=mean)
                self._refuse(own=not counts, of=of, helps=bool(among[-1] > 0))
        return self.staging.to_device(mean)

    def _refuse(self, own: bool, of: Membership, helps: bool) -> None:
        """Somebody's part in an average is not finite, and left out where that helps."""
        self.counts.refused += 1
        if not own:
            self.state.events.append("refused a part in an average: not finite")
        elif helps:
            self.state.events.append("our weights were not finite: taking over those of others")
            self.state.nonfinite = True
            of.want(of.generation + 1)
        else:
            self.state.events.append("our weights are not finite, and nobody's are")

    def _gather(self, effect: Gather, channel: str, of: Membership) -> list[tuple[Tensor, ...]]:
        with self.staging.sending(channel, *effect.tensors) as tensors:
            gathered = self.groups.gather(of, channel, tensors)
        for tensor in tensors:
            self._account(len(gathered), len(gathered) - 1, tensor)
        self._note(of, channel, f"{effect.topic}/{effect.round}", len(gathered) - 1, *tensors)
        finite = [all(is_finite(tensor) for tensor in each if tensor.is_floating_point()) for each in gathered]
        if not all(finite) and len(gathered) > 1:
            mine = of.present.index(self.worker.rank)
            self._refuse(own=not finite[mine], of=of, helps=any(finite))
            gathered = [each for each, good in zip(gathered, finite, strict=True) if good or not any(finite)]
        return [tuple(self.staging.to_device(tensor) for tensor in each) for each in gathered]

    def _account(self, members: int, share: float, vector: Tensor) -> None:
        if members > 1:
            self.counts.exchanges += 1
            self.counts.bytes_sent += round(share * vector.numel() * vector.element_size())

    def _note(self, of: Membership, channel: str, round_name: str, share: float, *vectors: Tensor) -> None:
        """Write down an average or a gathering, under a name that all its members give it."""
        if share > 0:
            members, began = of.took_part[channel]
            sent_bytes = round(share * sum(vector.numel() * vector.element_size() for vector in vectors))
            self.step_recorder.exchanged(members, began, sent_bytes, f"{of.generation}/{round_name}/{members[0]}")

    def drain(self) -> None:
        """Wait for what is under way."""
        for sent in list(self.state.under_way.values()):
            sent.exception()

    # The end

    def stop_background(self, within_s: float) -> None:
        """Let the background come to its end."""
        self.stopped = True
        with self._steps_changed:
            self._steps_changed.notify_all()
        # Whoever still waits for an average of all is let go: the others have left it.
        self.groups.leave()
        if self._thread is not None:
            self._thread.join(within_s)

    def finish(self, of: Membership) -> None:
        """The method's last words, with whoever is in ``of``."""
        generator = self.method.finish(self.worker)
        answer: Any = None
        with contextlib.suppress(StopIteration, StepRetry, TrainingEnded):
            while True:
                answer = self.answer(generator.send(answer), FOREGROUND, of)

    def close(self) -> None:
        """Leave the optimizer alone."""
        self.abandon_step()
        self.stopped = self.ended = True
        for hook in self._hooks:
            hook.remove()

    def join(self, within_s: float) -> None:
        """Wait for our threads, once nothing can hold them up any more."""
        if self._thread is not None:
            self._thread.join(within_s)
        if self._async_channel is not None:
            self._async_channel.close(within_s)


class _Merging:
    """Writes down when a generator merged what it had asked for, and how old that was."""

    def __init__(self, step_recorder: StepRecorder, worker: ProcessWorker) -> None:
        self.step_recorder, self.worker = step_recorder, worker
        self._since: int | None = None
        """The step at which the part of this worker was sent, if something was asked for that is merged."""

    def asked(self, effect: Effect) -> None:
        """The generator waits for this."""
        if isinstance(effect, Wait):
            self._since = effect.ticket.since_step
        else:
            self._since = self.worker.step if isinstance(effect, Mean | Gather | Swap) else None

    @contextlib.contextmanager
    def of(self, answer: Any) -> Iterator[None]:
        """The generator goes on with its answer."""
        began, since = time.monotonic(), self._since
        yield
        if since is not None and answer is not None:
            self.step_recorder.merged(began, self.worker.step - since)
