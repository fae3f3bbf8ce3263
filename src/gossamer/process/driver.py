"""Drives a method's generators: its ``step`` inside ``optimizer.step()``, its ``background`` in a thread beside it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Effect, Gather, Mean, Pair, Start, Steps, Swap, Ticket, Update, Wait
from gossamer.methods import Method
from gossamer.process.diary import Diary
from gossamer.process.exchanges import Exchanges
from gossamer.process.groups import BACKGROUND, COURIER, FOREGROUND, Aborted, Groups, Membership, Stopped, Void
from gossamer.process.metrics import Metrics
from gossamer.process.staging import Staging
from gossamer.process.state import WorkerState
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
        self._couriers: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None
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
        exchanges = self.exchanges
        if exchanges.in_step:
            # The optimizer failed in the middle of the last step, and the user has caught that: that step is void.
            self._step, self._void = None, True
            self.after_step()
        self.staging.training_here()
        self.start_background()
        exchanges.in_step, self._void = True, False
        self.diary.enter_step()
        self.lock.acquire()
        self.binding.enter_step()
        if exchanges.tainted:
            # This gradient was taken at weights that were not finite; others are in their place by now.
            exchanges.tainted, self._void = False, True
            self.binding.no_update()
            return
        self._step = self.method.step(self.worker)
        if self._foreground():
            self.binding.hand_over()
        else:
            self.binding.no_update()

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
                self.lock.acquire()
                self.counts.idle_s += time.monotonic() - began
                if not isinstance(effect, Start):
                    self.diary.waited(began)

    # The background thread

    def start_background(self) -> None:
        """From the first step on: until then a state may be loaded, and nothing of ours travels."""
        if self._thread is None and type(self.method).background is not Method.background:
            self._thread = threading.Thread(target=self._background, name="gossamer-background", daemon=True)
            self._thread.start()

    def _background(self) -> None:
        if self.binding.device.type == "cuda":
            torch.cuda.set_device(self.binding.device)
        asking = self.method.background(self.worker)
        merging = _Merging(self.diary, self.worker)
        answer: Any = None
        # It ends only where it waits for a next exchange or step: what was agreed on with a peer is done.
        try:
            while True:
                with self.lock, self.staging.beside_training(), merging.of(answer):
                    effect = asking.send(answer)
                merging.asked(effect)
                answer = self.answer(effect, BACKGROUND)
        except (Stopped, StopIteration):
            pass
        finally:
            asking.close()

    @property
    def started(self) -> bool:
        """Whether the background is at work, or has been."""
        return self._thread is not None

    # Both

    def answer(self, effect: Effect, lane: str, of: Membership | None = None) -> Any:
        """Do what a method asks for, except for updates."""
        of = of or self.groups.train
        if isinstance(effect, Steps):
            return self._await_steps(self.worker.step + effect.count)
        if isinstance(effect, Mean):
            return self._mean(effect, lane, of)
        if isinstance(effect, Gather):
            return self._gather(effect, lane, of)
        if isinstance(effect, Pair):
            return self.exchanges.pair(effect)
        if isinstance(effect, Swap):
            return self.exchanges.swap(effect)
        if isinstance(effect, Start):
            if self._couriers is None:
                self._couriers = ThreadPoolExecutor(1, thread_name_prefix="gossamer-courier")
            ticket = Ticket(effect.effect, since_step=self.worker.step)
            self.state.under_way[ticket] = self._couriers.submit(self.answer, effect.effect, COURIER, of)
            return ticket
        assert isinstance(effect, Wait)
        try:
            return self.state.under_way.pop(effect.ticket).result()
        except Aborted:
            self.groups.train.regroup(FOREGROUND)
            raise Void from None

    def _await_steps(self, target: int) -> None:
        with self._steps_changed:
            while self.worker.step < target and not self.stopped:
                self._steps_changed.wait(WAKE_S)
        if self.stopped:
            raise Stopped

    def _mean(self, effect: Mean, lane: str, of: Membership) -> Tensor:
        with self.staging.sending(lane, effect.vector) as (vector,):
            # A method is through with one answer before it asks for the next of its kind: one buffer serves them all.
            out = None if vector.is_cuda else self.staging.host_buffer(f"{lane} {effect.topic} mean", vector)
            mean, members = self.groups.mean(of, lane, vector, effect.group, out)
        self._account(members, 2 * (members - 1) / members, vector)
        self._note(of, lane, f"{effect.topic}/{effect.round}", 2 * (members - 1) / members, vector)
        return self.staging.to_device(mean)

    def _gather(self, effect: Gather, lane: str, of: Membership) -> list[tuple[Tensor, ...]]:
        with self.staging.sending(lane, *effect.tensors) as tensors:
            gathered = self.groups.gather(of, lane, tensors)
        for tensor in tensors:
            self._account(len(gathered), len(gathered) - 1, tensor)
        self._note(of, lane, f"{effect.topic}/{effect.round}", len(gathered) - 1, *tensors)
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
        self.stopped = self.ended = True
        for hook in self._hooks:
            hook.remove()
        if self._couriers is not None:
            self._couriers.shutdown(wait=False, cancel_futures=True)


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
