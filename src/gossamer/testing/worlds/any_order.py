"""A world that answers effects in an order that ``choices`` determine: whatever a real network could do, and worse.

Every answer reaches every worker at a moment of its own; gradients, exchanges and collectives interleave. A worker's
optimizer adds a random displacement; the world keeps their sum. It checks what a method yields, and that nothing
changes while it is in flight.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import (
    Gather,
    Mean,
    MethodGenerator,
    Pair,
    Shift,
    Start,
    Swap,
    Ticket,
    Update,
    Wait,
    WaitSteps,
)
from gossamer.errors import MethodError
from gossamer.methods import Method
from gossamer.methods.loading.method_contract import check_declaration, check_effect, check_generator, check_opening
from gossamer.testing.violations import Broken
from gossamer.testing.worlds.any_order_worker import Peer
from gossamer.testing.worlds.collective import Collective, Contribution, describe_call, same

Action = Callable[[], None]

FAILED_SWAPS = 0.1
"""The share of swaps that fail for both workers."""


class Coroutine:
    """One running generator of a worker's method."""

    def __init__(self, worker: Peer, part: str, generator: MethodGenerator, ended: Action) -> None:
        self.worker, self.part, self.generator, self.ended = worker, part, generator, ended
        self.opened = self.updated = False
        self.waits_for = ""
        """What it waits for, for people; empty while it waits for nothing but its turn."""


class AnyOrderWorld:
    def __init__(
        self,
        method: Method,
        *,
        steps: int,
        choices: list[int],
        seed: int = 0,
        dim: int = 4,
        apart: bool = True,
        stepped: Callable[[Peer], None] = lambda worker: None,
    ) -> None:
        check_declaration(method)
        self.method, self.steps, self.choices, self.stepped = method, steps, list(choices), stepped
        self.rest = random.Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        common = self.draw(dim)
        topology = method.topology
        self.workers = [
            Peer(rank, topology, seed, dim, self.draw(dim) if apart else common.clone())
            for rank in range(topology.workers)
        ]
        self.added = torch.zeros(dim, dtype=torch.float64)
        """Sum of what the optimizers of all workers have added."""
        self.deliveries: list[Action] = []
        self.sleeping: list[tuple[int, Coroutine]] = []
        self.waiting: dict[Ticket, Coroutine] = {}
        self.collectives: dict[Any, Collective] = {}
        self.last_rounds: dict[tuple[int, str], int] = {}
        """By rank and topic."""
        self.answers: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        """The newest mean that a worker got in each topic, and a copy of it."""
        self.ready: dict[int, Coroutine] = {}
        self.paired: dict[int, int] = {}
        """Each worker that has a peer and has not swapped with it."""
        self.swaps: dict[tuple[int, int], Contribution] = {}
        self.running: list[Coroutine] = []
        self.num_exchanges = self.num_means = 0
        self.ending = False
        """Messages in flight still arrive, but background parts start nothing new."""
        for worker in self.workers:
            method.begin(worker)
            if method.background is not None:
                self.run_part(worker, "background", lambda: None)

    def draw(self, dim: int) -> Tensor:
        return torch.randn(dim, generator=self.numbers, dtype=torch.float64)

    # Running

    def run(self) -> None:
        """Run until every worker has done its steps and every message in flight has arrived."""
        while any(worker.step < self.steps for worker in self.workers):
            self.act(self.possible())
        self.ending = True
        while self.deliveries:
            self.act(self.deliveries[:])
        self.ending = False

    def finish(self) -> None:
        self.running = [coroutine for coroutine in self.running if coroutine.part != "background"]
        if self.method.finish is None:
            return
        unfinished = set(range(len(self.workers)))
        for worker in self.workers:
            self.run_part(worker, "finish", partial(unfinished.discard, worker.rank))
        while unfinished:
            self.act(self.deliveries[:])

    def act(self, possible: list[Action]) -> None:
        if not possible:
            raise Broken("collectives", self.describe_deadlock())
        choice = self.choices.pop(0) if self.choices else self.rest.randrange(1 << 16)
        action = possible[choice % len(possible)]
        if action in self.deliveries:
            self.deliveries.remove(action)
        # Local time advances unevenly, and sometimes not at all.
        self.workers[choice % len(self.workers)].time += choice % 5 / 2
        action()

    def possible(self) -> list[Action]:
        actions = self.deliveries[:]
        for worker in self.workers:
            if worker.phase == "rest" and worker.step < self.steps:
                actions.append(partial(self.begin, worker))
            elif worker.phase == "computing":
                actions.append(partial(self.end, worker))
        for due, coroutine in self.sleeping:
            if coroutine.worker.step >= due:
                actions.append(partial(self.wake, due, coroutine))
        for a in self.ready:
            for b in self.ready:
                if a < b and b in self.method.topology.neighbours(a):
                    actions.append(partial(self.pair, a, b))
        return actions

    def describe_deadlock(self) -> str:
        waits = sorted(
            f"worker {coroutine.worker.rank} waits in {coroutine.part} for {coroutine.waits_for}"
            for coroutine in self.running
            if coroutine.waits_for
        )
        return "nobody can go on: " + "; ".join(waits or ["all workers wait"])

    # Actions

    def begin(self, worker: Peer) -> None:
        worker.phase, worker.point = "computing", worker.x.clone()
        if self.method.eval_point is not None:
            self.method.eval_point(worker, worker.point)

    def end(self, worker: Peer) -> None:
        worker.phase = "stepping"
        worker.gradient.copy_(0.3 * worker.point + self.draw(len(worker.x)))
        self.run_part(worker, "step", lambda: self.end_step(worker))

    def end_step(self, worker: Peer) -> None:
        if not worker.x.isfinite().all():
            raise Broken(
                "in_flight",
                f"the model of worker {worker.rank} is not finite after step {worker.step}: is a mean used after the "
                "next one of its topic was asked for or started? It is valid until then; clone it first",
            )
        self.stepped(worker)
        worker.step += 1
        worker.phase = "rest"

    def wake(self, due: int, coroutine: Coroutine) -> None:
        self.sleeping.remove((due, coroutine))
        self.resume(coroutine, None)

    def pair(self, a: int, b: int) -> None:
        first, second = self.ready.pop(a), self.ready.pop(b)
        self.paired |= {a: b, b: a}
        self.resume(first, b)
        self.resume(second, a)

    # Effects

    def run_part(self, worker: Peer, part: str, ended: Action) -> None:
        generator = getattr(self.method, part)
        started = only_update() if generator is None else check_generator(self.method, part, generator(worker))
        coroutine = Coroutine(worker, part, started, ended)
        self.running.append(coroutine)
        self.resume(coroutine, None)

    def resume(self, coroutine: Coroutine, answer: Any) -> None:
        worker, coroutine.waits_for = coroutine.worker, ""
        while True:
            try:
                effect = coroutine.generator.send(answer)
            except StopIteration:
                self.check_answers(worker)
                self.running.remove(coroutine)
                coroutine.ended()
                return
            self.check_answers(worker)
            if getattr(self.method, coroutine.part) is not None:
                check_effect(self.method, coroutine.part, effect)
            if coroutine.part == "step" and not coroutine.opened:
                check_opening(self.method, effect, worker.step)
            coroutine.opened, answer = True, None
            if isinstance(effect, Update):
                if coroutine.updated:
                    raise MethodError(f"step of method {self.method.name} yielded Update twice: expected one per step")
                coroutine.updated = True
                if effect.gradient is not None:
                    worker.gradient.copy_(effect.gradient)
                displacement = self.draw(len(worker.x))
                worker.x.add_(displacement)
                self.added += displacement
            elif isinstance(effect, Start):
                answer = ticket = Ticket(effect.effect, since_step=worker.step)
                self.send(worker, effect.effect, partial(self.fulfil, ticket))
            elif isinstance(effect, Wait) and effect.ticket.done:
                answer = effect.ticket.answer
            elif isinstance(effect, WaitSteps) and effect.count <= 0:
                pass
            else:
                self.block(coroutine, effect)
                return

    def block(self, coroutine: Coroutine, effect: Any) -> None:
        worker = coroutine.worker
        if isinstance(effect, Wait):
            coroutine.waits_for = describe_call(effect.ticket.effect)
            self.waiting[effect.ticket] = coroutine
        elif isinstance(effect, WaitSteps):
            self.sleeping.append((worker.step + effect.count, coroutine))
        elif isinstance(effect, Pair):
            if worker.rank in self.paired:
                raise Broken("effects", f"worker {worker.rank} yields Pair again before it has swapped with its peer")
            self.ready[worker.rank] = coroutine
        else:
            coroutine.waits_for = describe_call(effect)
            self.send(worker, effect, partial(self.resume, coroutine))

    def send(self, worker: Peer, effect: Mean | Gather | Shift | Swap, give: Callable[[Any], None]) -> None:
        if isinstance(effect, Swap):
            self.swap(worker, effect, give)
        else:
            self.arrive(worker, effect, give)

    def fulfil(self, ticket: Ticket, answer: Any) -> None:
        ticket.done, ticket.answer = True, answer
        if ticket in self.waiting:
            self.resume(self.waiting.pop(ticket), answer)

    def arrive(self, worker: Peer, effect: Mean | Gather | Shift, give: Callable[[Any], None]) -> None:
        last = self.last_rounds.get((worker.rank, effect.topic))
        if last is not None and effect.round <= last:
            raise Broken(
                "collectives",
                f"worker {worker.rank} takes part in {describe_call(effect)} after round {last}: "
                "expected ascending rounds within a topic",
            )
        self.last_rounds[worker.rank, effect.topic] = effect.round
        group = getattr(effect, "group", None)
        key = (type(effect), effect.topic, effect.round, group)
        if key not in self.collectives:
            self.collectives[key] = Collective(tuple(range(len(self.workers))) if group is None else group)
        collective = self.collectives[key]
        collective.add(worker.rank, Contribution(effect, give))
        if isinstance(effect, Mean):
            self.overwrite_answer(worker.rank, effect.topic)
        if self.ending:
            return
        self.num_means += collective.complete
        for rank, contribution, answer in collective.new_answers():
            self.deliveries.append(partial(self.deliver, rank, contribution, answer))

    def overwrite_answer(self, rank: int, topic: str) -> None:
        """Let the last mean of a topic become invalid: with real workers the next one takes its memory."""
        mean, _ = self.answers.pop((rank, topic), (None, None))
        if mean is not None:
            mean.fill_(torch.nan)

    def deliver(self, rank: int, contribution: Contribution, answer: Any) -> None:
        contribution.check_unchanged(rank)
        if isinstance(contribution.effect, Mean):
            mean = answer[0] if isinstance(answer, tuple) else answer
            self.answers[rank, contribution.effect.topic] = (mean, mean.clone())
        contribution.give(answer)

    def check_answers(self, worker: Peer) -> None:
        for (rank, topic), (mean, copy) in self.answers.items():
            if rank == worker.rank and not same(mean, copy):
                raise Broken(
                    "in_flight",
                    f"worker {rank} wrote to the mean that it got in topic {topic!r}: it is read-only; clone it first",
                )

    def swap(self, worker: Peer, swap: Swap, give: Callable[[Any], None]) -> None:
        rank, peer = worker.rank, swap.peer
        if self.paired.pop(rank, None) != peer:
            raise Broken("effects", f"worker {rank} yields Swap with worker {peer}, which is not the peer of its Pair")
        sent = Contribution(swap, give)
        other = self.swaps.pop((peer, rank), None)
        if other is None:
            self.swaps[rank, peer] = sent
            return
        self.num_exchanges += 1
        failed = self.rest.random() < FAILED_SWAPS
        for receiver, own, received in ((rank, sent, other), (peer, other, sent)):
            answer: Any = None if failed else received.copies[0].clone()
            if answer is not None and swap.scalars:
                answer = (answer, received.effect.scalars)
            self.deliveries.append(partial(self.deliver, receiver, own, answer))


def only_update() -> MethodGenerator:
    yield Update()
