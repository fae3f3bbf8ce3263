"""Drives a method's generators: ``step`` inside ``optimizer.step()``, ``background`` in a thread of its own.

The training thread holds the state's lock during a step, except while the method waits for communication. The
background thread holds it while the method merges. So nobody changes ``x`` while another thread works on it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Mean, MethodGenerator, Start, Update, Wait
from gossamer.errors import InputError, MethodError
from gossamer.methods.loading.method_contract import check_effect, check_generator, check_opening
from gossamer.process.collectives.membership import BACKGROUND, FOREGROUND, Membership
from gossamer.process.lifecycle import CommAborted, Phase, StepRetry, TrainingEnded
from gossamer.process.runtime.effect_handler import EffectHandler
from gossamer.process.runtime.partition_policy import PartitionPolicy
from gossamer.process.runtime.process_worker import MergeRecorder
from gossamer.process.runtime.worker_state import WorkerState
from gossamer.process.state.merging import ROOT
from gossamer.process.watches.optimizer_watch import OptimizerWatch

SERVE_POLL_S = 0.02


class Driver:
    def __init__(self, state: WorkerState, effects: EffectHandler, policy: PartitionPolicy) -> None:
        self._policy = policy
        self.state, self.effects, self.method, self.worker = state, effects, state.method, state.worker
        self.flat_model, self.lock, self.staging = state.flat_model, state.lock, state.staging
        self.lifecycle, self.metrics, self.recorder = state.lifecycle, state.metrics, state.worker.recorder
        self.last_step_at = self._gradient_at = time.monotonic()
        self._step: MethodGenerator | None = None
        self._void = False
        """The step in progress does not count: the membership changed in it, or its gradient is stale."""
        self._taken_over = False
        """The others have made the step in progress with this worker's gradient, and it has taken over the result."""
        self._opened = False
        """The step in progress has yielded its first effect."""
        self._updated = False
        """The step in progress has yielded its ``Update``."""
        self._update_gradient: Tensor | None = None
        """The gradient that ``Update`` was given."""
        self._updates = True
        """Steps are those of the user's optimizer."""
        self._thread: threading.Thread | None = None
        self._optimizer_watch = OptimizerWatch(self.flat_model, state.events)
        self._error: BaseException | None = None
        """What ended the background part, other than the end of training. The next step, or the end, raises it."""
        optimizer = self.flat_model.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(prepare_gradients),
            optimizer.register_step_pre_hook(lambda *_: self.before_step()),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]

    # The training thread

    def before_step(self) -> None:
        """Run the method's ``step`` up to its ``Update``. A step pre-hook of the optimizer."""
        if self.lifecycle.closed or overflowed(self.flat_model.optimizer):
            return
        self.abandon_step()
        self.raise_background_error()
        self.state.check_may_step()
        if self._updates:
            self._optimizer_watch.before_step()
        self.metrics.idle_s += self._policy.wait()
        self.raise_background_error()
        self.staging.note_training_stream()
        with self.lock:
            if self.state.watch.before_step(self.begun) and not self.begun:
                # A checkpoint of the model was loaded after join: the method begins with these weights.
                self.method.begin(self.worker)
        self.start_background()
        self.state.in_step = True
        self._void = self._taken_over = self._opened = self._updated = False
        self._gradient_at = time.monotonic()
        self._gradient_is_there()
        self.lock.acquire()
        self.flat_model.enter_step()
        if self.state.stale_gradient:
            self.state.stale_gradient, self._void = False, True
            self.flat_model.skip_update()
            return
        if self.effects.early is not None:
            self.effects.early.before_step()
        self._step = self._generator("step") if self.method.step is not None else _update()
        if self._run_step():
            self.flat_model.before_update(self._update_gradient)
            self._update_gradient = None
        else:
            self.flat_model.skip_update()

    def abandon_step(self) -> None:
        """End a step in which the optimizer failed, if the user caught the exception: it is void."""
        if self.state.in_step:
            self._step, self._void = None, True
            self.after_step()

    def after_step(self) -> None:
        """Run the method's ``step`` from its ``Update`` to its end. A step post-hook of the optimizer."""
        if not self.state.in_step or self.lifecycle.closed:
            return
        if self._step is not None:
            self.flat_model.after_update()
            self._run_step()
        self._step_ends()
        self.state.write_eval_point()
        self.flat_model.leave_step()
        if not self._void:
            self.worker.count_step()
            train = self.effects.groups.train
            self.state.count_step(train.view, len(train.members))
            self.metrics.steps += self._updates
            self.state.history.add_step(time.monotonic(), self.metrics.idle_s)
        elif not self._taken_over:
            self.metrics.repeated += 1
            self.metrics.dropped += 1
        self.lock.release()
        ended = time.monotonic()
        if not self._void:
            self.recorder.stepped(self.worker.run_rank, self.last_step_at, self._gradient_at, ended)
        self.last_step_at = ended
        self.state.in_step = False
        if self.effects.early is not None:
            self.effects.early.reset()
        self.effects.notify_step()

    def step_without_update(self) -> None:
        """Make a step that changes nothing here: averages that are due get what this worker did before."""
        self._updates = False
        self.flat_model.skip_update()
        self.before_step()
        self.after_step()

    def _gradient_is_there(self) -> None:
        """A step begins."""

    def _step_ends(self) -> None:
        """The method's part in a step is over; the lock is held."""

    def serve(self, until: Callable[[], bool]) -> None:
        """Let the background part go on between steps until ``until()``."""
        while not until():
            self.raise_background_error()
            time.sleep(SERVE_POLL_S)

    def _run_step(self) -> bool:
        """Run the method's step; return True at its ``Update``, False at its end."""
        assert self._step is not None
        merges = MergeRecorder(self.worker)
        answer: Any = None
        unchanged = self.method.keeps_gradient and not self._updated and self.state.replica is None
        while True:
            try:
                with merges.resume(answer):
                    effect = self._step.send(answer)
            except StopIteration:
                self._step = None
                return False
            check_effect(self.method, "step", effect)
            if not self._opened:
                self._opened = True
                check_opening(self.method, effect, self.worker.step)
            if isinstance(effect, Update):
                if self._updated:
                    raise MethodError(f"step of method {self.method.name} yielded Update twice: expected one per step")
                self._updated, self._update_gradient = True, effect.gradient
                return True
            merges.requested(effect)
            began = time.monotonic()
            view, lineage, nonfinite = self.effects.groups.train.view, self.state.lineage or ROOT, self.state.nonfinite
            # Communication may need the lock: a state transfer writes to x.
            self.lock.release()
            try:
                answer = self.effects.answer(effect, FOREGROUND)
                unchanged = False
            except (StepRetry, TrainingEnded) as ended:
                self._step.close()
                if isinstance(ended, StepRetry) and unchanged and not nonfinite:
                    # What a step sends before it waits for anything else is its gradient.
                    sent = not isinstance(effect, Wait)
                    self._taken_over = sent and (self.state.lineage or ROOT).has_more_of(view, lineage)
                    if not self._taken_over:
                        self._begin_again()
                        merges, answer = MergeRecorder(self.worker), None
                        continue
                self._step = None
                self._void = True
                return False
            finally:
                self.lock.acquire()
                self.metrics.idle_s += time.monotonic() - began
                if not isinstance(effect, Start):
                    self.recorder.waited(self.worker.run_rank, began, time.monotonic())

    def _begin_again(self) -> None:
        """Begin the method's step once more, with the same gradient.

        Nothing that the step did has had an effect. If this worker has taken over other weights meanwhile, its gradient
        is a step late, as one is that overlaps with communication.
        """
        self.metrics.repeated += 1
        # The members may be too few now.
        self._policy.wait()
        self._opened = False
        if self.effects.early is not None:
            self.effects.early.reset()
            self.effects.early.before_step()
        self._step = self._generator("step")

    # The background thread

    def start_background(self) -> None:
        """Start the background part, if the method has one. At the first step: a state may be loaded until then."""
        if self._thread is None and self.method.background is not None:
            self._thread = threading.Thread(target=self._run_background, name="gossamer-background", daemon=True)
            self._thread.start()

    def _run_background(self) -> None:
        if self.flat_model.device.type == "cuda":
            torch.cuda.set_device(self.flat_model.device)
        generator: MethodGenerator | None = None
        merges = MergeRecorder(self.worker)
        answer: Any = None
        # It ends only where it waits for its next exchange or step: an exchange that was agreed on is completed.
        try:
            generator, began_in = self._generator("background"), self.effects.lockstep_generation
            while True:
                with self.lock, self.staging.on_training_stream(), merges.resume(answer):
                    effect, answer = generator.send(answer), None
                check_effect(self.method, "background", effect)
                merges.requested(effect)
                try:
                    answer = self.effects.answer(effect, BACKGROUND, started_in=began_in)
                except (StepRetry, CommAborted) as lost:
                    generator.close()
                    if isinstance(lost, CommAborted):
                        self.effects.wait_for_rebuild()
                    generator, began_in = self._generator("background"), self.effects.lockstep_generation
                    answer = None
        except (TrainingEnded, StopIteration):
            pass
        except BaseException as error:
            self._error = error
        finally:
            if generator is not None:
                generator.close()

    def raise_background_error(self) -> None:
        """Raise what ended the background part."""
        if self._error is not None:
            raise self._error

    def _generator(self, part: str) -> MethodGenerator:
        return check_generator(self.method, part, getattr(self.method, part)(self.worker))

    @property
    def background_started(self) -> bool:
        return self._thread is not None

    @property
    def begun(self) -> bool:
        """Whether this worker has made a step, or serves exchanges."""
        return self.worker.step > 0 or self.background_started

    # The end

    def stop_background(self, timeout_s: float) -> None:
        """Let the background part come to its end."""
        self.lifecycle.advance(Phase.STOPPED)
        self.effects.notify_step()
        # Release threads that wait for a collective of all: the others have left it.
        self.effects.groups.release()
        self._join_background(timeout_s)

    def fail(self, error: InputError) -> None:
        """Let nothing wait for other workers any more; the next step raises ``error``."""
        self._error = error
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Let nothing wait for other workers any more: a step in progress is void."""
        self.lifecycle.advance(Phase.STOPPED)
        self.effects.groups.disconnect()

    def _join_background(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def finish_method(self, of: Membership, weight: float) -> None:
        """Run the method's ``finish`` among the members of ``of``. ``weight``: of this worker's part in means."""
        if self.method.finish is None:
            return
        generator = self._generator("finish")
        answer: Any = None
        with contextlib.suppress(StopIteration, StepRetry, TrainingEnded):
            while True:
                effect = generator.send(answer)
                check_effect(self.method, "finish", effect)
                if isinstance(effect, Mean):
                    effect = replace(effect, weight=weight * effect.weight)
                answer = self.effects.answer(effect, FOREGROUND, of)

    def close(self) -> None:
        self.abandon_step()
        self.state.watch.close()
        self.lifecycle.advance(Phase.CLOSED)
        for hook in self._hooks:
            hook.remove()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads, once nothing blocks them any more."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        self.effects.close(timeout_s)


def _update() -> MethodGenerator:
    """The step of a method without one of its own."""
    yield Update()


def prepare_gradients(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any] | None:
    """Make the gradients available and unscale them, before a method reads them. A step pre-hook.

    A closure is evaluated here, at the weights of the forward pass; the optimizer gets its result. A ``GradScaler``
    leaves the loss scale in the gradients of fused optimizers, and workers' scales differ.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None and not overflowed(optimizer):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        optimizer.grad_scale = None  # type: ignore[attr-defined]
    return None if closure is None else (args, kwargs)


def overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a ``GradScaler`` makes a fused optimizer skip this step. For others it skips the call itself."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
