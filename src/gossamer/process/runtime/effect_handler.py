"""Answers the effects that a method yields with real communication."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Effect, Gather, Mean, Pair, Start, Swap, Ticket, Wait, WaitSteps
from gossamer.process.collectives.groups import Groups
from gossamer.process.collectives.membership import ASYNC, FOREGROUND, CommAborted, Membership, StepRetry
from gossamer.process.daemon_executor import DaemonExecutor
from gossamer.process.lifecycle import TrainingEnded
from gossamer.process.pairwise.exchanges import PairwiseExchanges
from gossamer.process.runtime.worker_state import WorkerState, is_finite

WAKE_S = 0.1
"""How often a thread that waits for steps checks whether training has stopped."""


class EffectHandler:
    """Answers every effect except ``Update``, from any thread."""

    def __init__(self, state: WorkerState, groups: Groups, exchanges: PairwiseExchanges) -> None:
        self.state, self.worker, self.groups, self.exchanges = state, state.worker, groups, exchanges
        self.lifecycle, self.staging, self.metrics = state.lifecycle, state.staging, state.metrics
        self._step_done = threading.Condition()
        self._async_channel: DaemonExecutor | None = None

    def answer(self, effect: Effect, channel: str, of: Membership | None = None, started_in: int | None = None) -> Any:
        """Do what a method asks for and return the answer; in no other generation than ``started_in``, if given."""
        of = of or self.groups.train
        if isinstance(effect, WaitSteps):
            return self._wait_steps(self.worker.step + effect.count)
        if isinstance(effect, Mean):
            return self._mean(effect, channel, of, started_in)
        if isinstance(effect, Gather):
            return self._gather(effect, channel, of)
        if isinstance(effect, Pair):
            return self.exchanges.pair(effect)
        if isinstance(effect, Swap):
            return self.exchanges.swap(effect)
        if isinstance(effect, Start):
            return self._start(effect, of)
        assert isinstance(effect, Wait)
        try:
            return self.state.in_flight.pop(effect.ticket).result()
        except CommAborted:
            if of is self.groups.train:
                self.groups.train.rebuild(FOREGROUND)
            raise StepRetry from None

    def _start(self, effect: Start, of: Membership) -> Ticket:
        if self._async_channel is None:
            self._async_channel = DaemonExecutor("gossamer-async")
        ticket = Ticket(effect.effect, since_step=self.worker.step)
        call = partial(self.answer, effect.effect, ASYNC, of, of.generation)
        self.state.in_flight[ticket] = self._async_channel.submit(call)
        return ticket

    def _wait_steps(self, target: int) -> None:
        with self._step_done:
            while self.worker.step < target and not self.lifecycle.stopped:
                self._step_done.wait(WAKE_S)
        if self.lifecycle.stopped:
            raise TrainingEnded

    def notify_step(self) -> None:
        with self._step_done:
            self._step_done.notify_all()

    # Collectives

    def _mean(self, effect: Mean, channel: str, of: Membership, started_in: int | None) -> Tensor:
        with self.staging.sending(channel, effect.vector) as (vector,):
            # A method is through with one answer before it asks for the next of that topic: one buffer serves all.
            out = None if vector.is_cuda else self.staging.host_buffer(f"{channel} {effect.topic} mean", vector)
            mean, size = self.groups.mean(of, channel, vector, effect.group, out, started_in)
            self._count(of, channel, f"{effect.topic}/{effect.round}", size, 2 * (size - 1) / size, vector)
            if size > 1 and not is_finite(mean):
                # All members see this: they repeat the mean without the vectors that are not finite.
                finite = is_finite(vector)
                share = vector.new_ones(1) if finite else vector.new_zeros(1)
                extended = torch.cat((vector if finite else torch.zeros_like(vector), share))
                repeated, _ = self.groups.mean(of, channel, extended, effect.group, started_in=started_in)
                if repeated[-1] > 0:
                    mean = torch.div(repeated[:-1], repeated[-1], out=mean)
                self._refuse(own=not finite, of=of, others_finite=bool(repeated[-1] > 0))
        return self.staging.to_device(mean)

    def _gather(self, effect: Gather, channel: str, of: Membership) -> list[tuple[Tensor, ...]]:
        with self.staging.sending(channel, *effect.tensors) as tensors:
            gathered = self.groups.gather(of, channel, tensors)
        size = len(gathered)
        self._count(of, channel, f"{effect.topic}/{effect.round}", size, size - 1, *tensors)
        finite = [all(is_finite(tensor) for tensor in each if tensor.is_floating_point()) for each in gathered]
        if not all(finite) and size > 1:
            own = of.members.index(self.worker.rank)
            self._refuse(own=not finite[own], of=of, others_finite=any(finite))
            gathered = [each for each, good in zip(gathered, finite, strict=True) if good or not any(finite)]
        return [tuple(self.staging.to_device(tensor) for tensor in each) for each in gathered]

    def _refuse(self, own: bool, of: Membership, others_finite: bool) -> None:
        """A part of a collective is not finite. It is left out, unless all parts are so."""
        self.metrics.refused += 1
        if not own:
            self.state.events.append("refused a part in an average: not finite")
        elif others_finite:
            self.state.events.append("our weights were not finite: taking over those of others")
            self.state.nonfinite = True
            of.request(of.generation + 1)
        else:
            self.state.events.append("our weights are not finite, and nobody's are")

    def _count(self, of: Membership, channel: str, name: str, size: int, share: float, *tensors: Tensor) -> None:
        """Count and record a collective of ``size`` members, each of which sent ``share`` times its tensors."""
        if size == 1:
            return
        sent_bytes = round(share * sum(tensor.nbytes for tensor in tensors))
        self.metrics.exchanges += 1
        self.metrics.bytes_sent += sent_bytes
        members, started = of.last_collective[channel]
        # All members know the collective by the same name.
        name = f"{of.generation}/{name}/{members[0]}"
        self.worker.recorder.exchanged(members, started, time.monotonic(), sent_bytes, name)

    # Closing

    def drain(self) -> None:
        for future in list(self.state.in_flight.values()):
            future.exception()

    def close(self, timeout_s: float) -> None:
        if self._async_channel is not None:
            self._async_channel.close(timeout_s)
