"""Answers the effects that a method yields with real communication."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Effect, Gather, Mean, Pair, Shift, Shifted, Start, Swap, Ticket, Wait, WaitSteps
from gossamer.errors import MethodError
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.encoded_mean import EncodedMeans
from gossamer.process.collectives.groups import TAIL, Groups
from gossamer.process.collectives.membership import ASYNC, FOREGROUND, Membership
from gossamer.process.daemon_executor import DaemonExecutor
from gossamer.process.events import EventKind
from gossamer.process.lifecycle import CommAborted, StepRetry, TrainingEnded
from gossamer.process.pairwise.exchanges import SCALAR_BYTES, PairwiseExchanges
from gossamer.process.runtime.early_gradient import EarlyGradient
from gossamer.process.runtime.worker_state import WorkerState, is_finite

WAKE_S = 0.1
"""How often a thread that waits for steps checks whether training has stopped."""

REBUILD_POLL_S = 0.01


class EffectHandler:
    """Answers every effect except ``Update``, from any thread."""

    early: EarlyGradient | None = None
    """Sends the gradient during the backward pass, if the method begins its steps with the mean of it."""

    def __init__(
        self, state: WorkerState, groups: Groups, exchanges: PairwiseExchanges, encoded: EncodedMeans | None = None
    ) -> None:
        """``encoded``: means of vectors that are encoded on the wire; None: they travel as they are."""
        self._encoded = encoded
        self.state, self.worker, self.groups, self.exchanges = state, state.worker, groups, exchanges
        self.lifecycle, self.staging, self.metrics = state.lifecycle, state.staging, state.metrics
        self._step_done = threading.Condition()
        self.leaving = False
        """No more steps come: who waits for some goes on, once."""
        self.last_steps_shared = threading.Event()
        """Set while this worker leaves, once its background waits again: the others have all its steps then."""
        self._released = False
        """The background has been let go on once since this worker leaves."""
        self._async_channels: dict[str, DaemonExecutor] = {}
        """One per topic: communication of different topics is started in any order."""

    def answer(self, effect: Effect, channel: str, of: Membership | None = None, started_in: int | None = None) -> Any:
        """Do what a method asks for and return the answer; in no other generation than ``started_in``, if given."""
        of = of or self.groups.train
        if isinstance(effect, WaitSteps):
            return self.wait_steps(self.worker.step + effect.count)
        if isinstance(effect, Mean):
            return self._mean(effect, channel, of, started_in)
        if isinstance(effect, Gather):
            return self._gather(effect, channel, of, started_in)
        if isinstance(effect, Shift):
            return self._shift(effect, channel, of, started_in)
        if isinstance(effect, Pair):
            return self.exchanges.pair(effect)
        if isinstance(effect, Swap):
            return self.exchanges.swap(effect)
        if isinstance(effect, Start):
            return self._start(effect.effect, of)
        assert isinstance(effect, Wait)
        return self._wait(effect.ticket, channel, of)

    def _start(self, effect: Mean | Gather | Shift | Swap, of: Membership) -> Ticket:
        topic = "swap" if isinstance(effect, Swap) else effect.topic
        channel = f"{ASYNC} {topic}"
        if channel not in self._async_channels:
            self._async_channels[channel] = DaemonExecutor(f"gossamer-{channel.replace(' ', '-')}")
        ticket = Ticket(effect, since_step=self.worker.step)
        call = partial(self.answer, effect, channel, of, of.generation)
        self.state.in_flight[ticket] = self._async_channels[channel].submit(call)
        return ticket

    def _wait(self, ticket: Ticket, channel: str, of: Membership) -> Any:
        if not ticket.done:
            if ticket not in self.state.in_flight:
                raise MethodError(f"method {self.state.method.name} waits for {ticket!r}, which is not in flight")
            effect = ticket.effect
            if not isinstance(effect, Swap):
                call = self._call(effect)
                of.waits.begin(channel, call, of.members_of(call.group))
            try:
                ticket.answer = self.state.in_flight.pop(ticket).result()
                ticket.done = True
            except CommAborted:
                if channel != of.owner:
                    raise
                if of is not self.groups.train:
                    raise StepRetry from None
                of.rebuild(channel)
                # This worker is alone, so the step goes on. The workers that a Shift names may have left the topology.
                alone = Shifted(None, (), False) if isinstance(effect, Shift) else self.answer(effect, channel, of)
                ticket.answer, ticket.done = alone, True
            finally:
                of.waits.end(channel, completed=ticket.done)
        return ticket.answer

    @property
    def lockstep_generation(self) -> int | None:
        """In lockstep: the generation of the members. A background part that began in an earlier one begins anew at its
        next collective, on all of them: on some of them a collective of it was lost."""
        of = self.groups.train
        return of.generation if of.owner == FOREGROUND else None

    def wait_for_rebuild(self) -> None:
        """Wait until the training has rebuilt the membership in which a collective of the background was lost."""
        of = self.groups.train
        while of.requested > of.generation:
            if self.lifecycle.stopped:
                raise TrainingEnded
            time.sleep(REBUILD_POLL_S)

    def wait_steps(self, target: int) -> None:
        """Wait until the worker has done so many steps; TrainingEnded if it will not."""
        with self._step_done:
            while self.worker.step < target and not self.lifecycle.stopped:
                if self.leaving and not self._released:
                    break
                if self.leaving:
                    self.last_steps_shared.set()
                self._step_done.wait(WAKE_S)
            self._released = self.leaving
        if self.lifecycle.stopped:
            raise TrainingEnded

    def notify_step(self) -> None:
        with self._step_done:
            self._step_done.notify_all()

    # Collectives

    def _mean(self, effect: Mean, channel: str, of: Membership, started_in: int | None) -> Any:
        call = self._call(effect)
        early = self.early if self.early is not None and of is self.groups.train else None
        if early is not None and early.averages(effect):
            mean, size = early.mean()
            self._count(of, early.last_channel, call, size, 2 * (size - 1) / size, effect.vector)
            if mean is not None:
                return mean
        mean_of = partial(self.groups.mean, of, channel, call=call, started_in=started_in)
        if self._encoded is not None and of is self.groups.train:
            result, sent_bytes = self._encoded.mean(
                of,
                channel,
                effect.vector,
                call,
                weight=effect.weight,
                scalars=effect.scalars,
                same=effect.same,
                started_in=started_in,
            )
            self._count_bytes(of, channel, call, result.members, sent_bytes)
            if result.members == 1 or is_finite(result.mean):
                return (result.mean, result.scalars) if effect.scalars else result.mean
        with self.staging.sending(channel, effect.vector) as (vector,):
            # A method is through with one answer before it asks for the next of that topic: one buffer serves all.
            out = None if vector.is_cuda else self._host_buffer(f"{channel} {effect.topic} mean", vector)
            result = mean_of(vector, weight=effect.weight, scalars=effect.scalars, out=out)
            size = result.members
            self._count(of, channel, call, size, 2 * (size - 1) / size, vector, num_scalars=len(effect.scalars))
            if size > 1 and not is_finite(result.mean):
                # All members see this: they repeat the mean without the vectors that are not finite.
                finite = is_finite(vector)
                part = vector if finite else torch.zeros_like(vector)
                repeated = mean_of(part, weight=effect.weight if finite else 0.0, scalars=effect.scalars)
                if repeated.weight > 0:
                    result = repeated
                self._refuse(own=not finite, of=of, others_finite=repeated.weight > 0)
        mean = self.staging.to_device(result.mean)
        return (mean, result.scalars) if effect.scalars else mean

    def _host_buffer(self, name: str, vector: Tensor, extra: int = TAIL) -> Tensor:
        return self.staging.host_buffer(name, vector, len(vector) + extra)

    def _gather(self, effect: Gather, channel: str, of: Membership, started_in: int | None) -> list[tuple[Tensor, ...]]:
        call = self._call(effect)
        with self.staging.sending(channel, *effect.tensors) as tensors:
            gathered = self.groups.gather(of, channel, tensors, call, started_in)
        size = len(gathered)
        self._count(of, channel, call, size, size - 1, *tensors)
        finite = [all(is_finite(tensor) for tensor in each if tensor.is_floating_point()) for each in gathered]
        if not all(finite) and size > 1:
            own = of.members_of(call.group).index(self.worker.run_rank)
            self._refuse(own=not finite[own], of=of, others_finite=any(finite))
            gathered = [each for each, good in zip(gathered, finite, strict=True) if good or not any(finite)]
        return [tuple(self.staging.to_device(tensor) for tensor in each) for each in gathered]

    def _shift(self, effect: Shift, channel: str, of: Membership, started_in: int | None) -> Shifted:
        call = self._call(effect)
        sent = self.staging.to_host(effect.vector, f"{channel} shifted")
        out = self._host_buffer(f"{channel} {effect.topic} shift", sent, extra=0)
        to, source = map(self.worker.placement.rank_at, (effect.to, effect.source))
        received, scalars, delivered = self.groups.shift(
            of, channel, sent, to, source, call, scalars=effect.scalars, out=out, started_in=started_in
        )
        if effect.to != self.worker.rank and (delivered or received is not None):
            num_scalars = len(effect.scalars) if delivered else 0
            self._count(of, channel, call, len(of.members), int(delivered), sent, num_scalars=num_scalars)
        if not is_finite(sent) and effect.to != self.worker.rank:
            self._refuse(own=True, of=of, others_finite=True)
        if received is not None and not is_finite(received):
            self.metrics.refused += 1
            self.state.events.add(EventKind.REFUSED, f"refused a message of worker {source}: not finite", source)
            received, scalars = None, ()
        return Shifted(None if received is None else self.staging.to_device(received), scalars, delivered)

    def _refuse(self, own: bool, of: Membership, others_finite: bool) -> None:
        """A part of a collective is not finite. It is left out, unless all parts are so."""
        self.metrics.refused += 1
        if not own:
            self.state.events.add(EventKind.REFUSED, "refused a part in an average: not finite")
        elif others_finite:
            self.state.events.add(EventKind.REFUSED, "our weights were not finite: taking over those of others")
            self.state.nonfinite = True
            of.request(of.generation + 1)
        else:
            self.state.events.add(EventKind.REFUSED, "our weights are not finite, and nobody's are")

    def _count(
        self, of: Membership, channel: str, call: Call, size: int, share: float, *tensors: Tensor, num_scalars: int = 0
    ) -> None:
        """Count and record a collective of ``size`` members, each of which sent ``share`` times its tensors."""
        sent_bytes = round(share * (sum(tensor.nbytes for tensor in tensors) + SCALAR_BYTES * num_scalars))
        self._count_bytes(of, channel, call, size, sent_bytes)

    def _count_bytes(self, of: Membership, channel: str, call: Call, size: int, sent_bytes: int) -> None:
        if size == 1:
            return
        self.metrics.exchanges += 1
        self.metrics.bytes_sent += sent_bytes
        if of is self.groups.train:
            self.state.history.touch(time.monotonic())
        members, started = of.last_collective[channel]
        # All members know the collective by the same name.
        name = f"{of.generation}/{call.topic}/{call.round}/{members[0]}"
        self.worker.recorder.exchanged(members, started, time.monotonic(), sent_bytes, name)

    def _call(self, effect: Mean | Gather | Shift) -> Call:
        """Return the name that all members of a collective give it."""
        tensors = effect.tensors if isinstance(effect, Gather) else (effect.vector,)
        layout = ", ".join(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
        group = None if isinstance(effect, Shift) else effect.group
        ranks = None if group is None else self.worker.placement.to_ranks(group)
        return Call(type(effect).__name__, effect.topic, effect.round, ranks, layout)

    # Closing

    def drain(self) -> None:
        for future in list(self.state.in_flight.values()):
            future.exception()

    def close(self, timeout_s: float) -> None:
        if self.early is not None:
            self.early.close(timeout_s)
        for async_channel in self._async_channels.values():
            async_channel.close(timeout_s)
