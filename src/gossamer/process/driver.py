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

from gossamer.effects import Effect, Gather, Mean, Pair, Start, Steps, Swap, Ticket, Update, Wait
from gossamer.methods import Method
from gossamer.process.aside import Aside
from gossamer.process.diary import Diary
from gossamer.process.exchanges import Exchanges
from gossamer.process.groups import Groups
from gossamer.process.membership import BACKGROUND, COURIER, FOREGROUND, Aborted, Membership, Stopped, Void
from gossamer.process.metrics import Metrics
from gossamer.process.priority import GivingWay
from gossamer.process.staging import Staging
from gossamer.process.state import WorkerState, is_finite
from gossamer.process.step_call import overflowed, prepare
from gossamer.process.worker import ProcessWorker

WAKE_S = 0.1
"""How often a thread that waits for steps looks whether training has stopped."""


class Driver:
    """One worker's method at work."""

    def __init__(
        self,
        state: WorkerState,
        groups: Groups,
        exchanges: Exchanges,
        staging: Staging,
        counts: Metrics,
        diary: Diary,
    ) -> None:
        self.diary = diary
        self.state, self.method, self.worker = state, state.method, state.worker
        self.binding, self.lock = state.binding, state.lock
        self.groups, self.exchanges, self.staging, self.counts = groups, exchanges, staging, counts
        self.stopped = False
        """Training has ended, for the background."""
        self.ended = False
        """Nothing is done any more inside ``optimizer.step()``."""
        self._step: Generator[Effect, Any, None] | None = None
        self._void = False
        self._steps_changed = threading.Condition()
        self._courier: Aside | None = None
        self._thread: threading.Thread | None = None
        self._giving_way = GivingWay()
        """The background's thread does."""
        self._hooks = [
            self.binding.optimizer.register_step_pre_hook(prepare),
            self.binding.optimizer.register_step_pre_hook(lambda *_: self.before_step()),
            self.binding.optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]

    # The training thread

    def before_step(self) -> None:
        """The optimizer is about to make its step."""
        if self.ended or overflowed(self.binding.optimizer):
            return
        self.abandon_step()
        self.staging.training_here()
        self.start_background()
        self.exchanges.in_step, self._void = True, False
        self.diary.enter_step()
        self._lock_for_training()
        self.binding.enter_step()
        if self.state.tainted:
            # This gradient was taken at weights that were not finite; others are in their place by now.
            self.state.tainted, self._void = False, True
            self.binding.no_update()
            return
        self._step = self.method.step(self.worker)
        if self._foreground():
            self.binding.hand_over()
        else:
            self.binding.no_update()

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
            self.binding.updated()
            self._foreground()
        if self.binding.two_vectors:
            self.method.point(self.worker, self.binding.weights)
        self.binding.leave_step()
        if not self._void:
            self.worker.stepped()
            self.counts.steps += 1
        self.lock.release()
        self.diary.leave_step(self._void)
        self.exchanges.in_step = False
        with self._steps_changed:
            self._steps_changed.notify_all()

    def _foreground(self) -> bool:
        """Drive the method's step; True if it asks for the optimizer's update, False if it is over."""
        assert self._step is not None
        merging = _Merging(self.diary, self.worker)
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
            except (Void, Stopped):
                self._step.close()
                self._step = None
                self._void = True
                return False
            finally:
                self._lock_for_training()
                self.counts.idle_s += time.monotonic() - began
                if not isinstance(effect, Start):
                    self.diary.waited(began)

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
        if self.binding.device.type == "cuda":
            torch.cuda.set_device(self.binding.device)
        asking = self.method.background(self.worker)
        merging = _Merging(self.diary, self.worker)
        answer: Any = None
        # It ends only where it waits for a next exchange or step: what was agreed on with a peer is done.
        try:
            while True:
                with self.lock, self.staging.beside_training(), merging.of(answer):
                    effect, answer = asking.send(answer), None
                merging.asked(effect)
                try:
                    answer = self.answer(effect, BACKGROUND)
                except Void:
                    asking.close()
                    asking, answer = self.method.background(self.worker), None
        except (Stopped, StopIteration):
            pass
        finally:
            asking.close()
            self._giving_way.end()

    @property
    def started(self) -> bool:
        """Whether the background is at work, or has been."""
        return self._thread is not None

    # Both

    def answer(self, effect: Effect, lane: str, of: Membership | None = None, begun: int | None = None) -> Any:
        """Do what a method asks for, except for updates; in no other generation than ``begun``, if given."""
        of = of or self.groups.train
        if isinstance(effect, Steps):
            return self._await_steps(self.worker.step + effect.count)
        if isinstance(effect, Mean):
            return self._mean(effect, lane, of, begun)
        if isinstance(effect, Gather):
            return self._gather(effect, lane, of)
        if isinstance(effect, Pair):
            return self.exchanges.pair(effect)
        if isinstance(effect, Swap):
            return self.exchanges.swap(effect)
        if isinstance(effect, Start):
            if self._courier is None:
                self._courier = Aside("gossamer-courier")
            ticket = Ticket(effect.effect, since_step=self.worker.step)
            errand = partial(self.answer, effect.effect, COURIER, of, of.generation)
            self.state.under_way[ticket] = self._courier.submit(errand)
            return ticket
        assert isinstance(effect, Wait)
        try:
            return self.state.under_way.pop(effect.ticket).result()
        except Aborted:
            if of is self.groups.train:
                self.groups.train.regroup(FOREGROUND)
            raise Void from None

    def _await_steps(self, target: int) -> None:
        with self._steps_changed:
            while self.worker.step < target and not self.stopped:
                self._steps_changed.wait(WAKE_S)
        if self.stopped:
            raise Stopped

    def _mean(self, effect: Mean, lane: str, of: Membership, begun: int | None) -> Tensor:
        with self.staging.sending(lane, effect.vector) as (vector,):
            # A method is through with one answer before it asks for the next of its kind: one buffer serves them all.
            out = None if vector.is_cuda else self.staging.host_buffer(f"{lane} {effect.topic} mean", vector)
            mean, members = self.groups.mean(of, lane, vector, effect.group, out, begun)
            self._account(members, 2 * (members - 1) / members, vector)
            self._note(of, lane, f"{effect.topic}/{effect.round}", 2 * (members - 1) / members, vector)
            if members > 1 and not is_finite(mean):
                # All members see it: once more, without those whose vectors are to blame.
                counts = is_finite(vector)
                share = vector.new_ones(1) if counts else vector.new_zeros(1)
                extended = torch.cat((vector if counts else torch.zeros_like(vector), share))
                among, _ = self.groups.mean(of, lane, extended, effect.group, begun=begun)
                if among[-1] > 0:
                    mean = torch.div(among[:-1], among[-1], out=mean)
                self._refuse(own=not counts, of=of, helps=bool(among[-1] > 0))
        return self.staging.to_device(mean)

    def _refuse(self, own: bool, of: Membership, helps: bool) -> None:
        """Somebody's part in an average is not finite, and left out where that helps."""
        self.counts.refused += 1
        if not own:
            self.state.news.append("refused a part in an average: not finite")
        elif helps:
            self.state.news.append("our weights were not finite: taking over those of others")
            self.state.sick = True
            of.want(of.generation + 1)
        else:
            self.state.news.append("our weights are not finite, and nobody's are")

    def _gather(self, effect: Gather, lane: str, of: Membership) -> list[tuple[Tensor, ...]]:
        with self.staging.sending(lane, *effect.tensors) as tensors:
            gathered = self.groups.gather(of, lane, tensors)
        for tensor in tensors:
            self._account(len(gathered), len(gathered) - 1, tensor)
        self._note(of, lane, f"{effect.topic}/{effect.round}", len(gathered) - 1, *tensors)
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

    def _note(self, of: Membership, lane: str, round_name: str, share: float, *vectors: Tensor) -> None:
        """Write down an average or a gathering, under a name that all its members give it."""
        if share > 0:
            members, began = of.took_part[lane]
            sent_bytes = round(share * sum(vector.numel() * vector.element_size() for vector in vectors))
            self.diary.exchanged(members, began, sent_bytes, f"{of.generation}/{round_name}/{members[0]}")

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
        asking = self.method.finish(self.worker)
        answer: Any = None
        with contextlib.suppress(StopIteration, Void, Stopped):
            while True:
                answer = self.answer(asking.send(answer), FOREGROUND, of)

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
        if self._courier is not None:
            self._courier.close(within_s)


class _Merging:
    """Writes down when a generator merged what it had asked for, and how old that was."""

    def __init__(self, diary: Diary, worker: ProcessWorker) -> None:
        self.diary, self.worker = diary, worker
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
            self.diary.merged(began, self.worker.step - since)
