"""A world that answers effects in an order that ``choices`` determine: whatever a real network could do, and worse.

Every answer reaches every worker at a moment of its own; gradients, exchanges and collectives interleave. A worker's
optimizer adds a random displacement; the world keeps their sum.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.effects import Gather, Mean, MethodGenerator, Pair, Start, Swap, Ticket, Update, Wait, WaitSteps
from gossamer.methods import Method
from gossamer.topology import Topology

Action = Callable[[], None]


class Peer:
    """A worker of this world."""

    def __init__(self, rank: int, topology: Topology, seed: int, dim: int, x: Tensor) -> None:
        self.rank, self.topology, self.seed, self.num_workers = rank, topology, seed, topology.workers
        self.rng = np.random.default_rng([seed, rank])
        self.step, self.time = 0, 0.0
        self.x, self.gradient = x, torch.zeros(dim, dtype=torch.float64)
        self.scalars: dict[str, float] = {}
        self.tickets: dict[str, Ticket] = {}
        self.vectors: dict[str, Tensor] = {}
        self.phase = "rest"  # then "computing", then "stepping"
        self.point = x.clone()

    def vector(self, name: str, size: int | None = None) -> Tensor:
        return self.vectors.setdefault(name, self.x.new_zeros(len(self.x) if size is None else size))

    def optimizer_setting(self, name: str) -> Any:
        return {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}[name]

    def snapshot(self, write: Any = None) -> Tensor:
        sent = self.x.clone()
        if write is not None:
            write(self, sent)
        return sent


class Coroutine:
    def __init__(self, worker: Peer, generator: Any, ended: Action) -> None:
        self.worker, self.generator, self.ended = worker, generator, ended


class Deadlock(AssertionError):
    """No action is possible, and some worker is not done."""


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
        self.collectives: dict[Any, dict[int, tuple[Mean | Gather, Any, Callable[[Any], None]]]] = {}
        self.ready: dict[int, Coroutine] = {}
        self.swaps: dict[tuple[int, int], tuple[Coroutine, Swap]] = {}
        self.num_exchanges = self.num_means = 0
        self.ending = False
        """Messages in flight still arrive, but background parts start nothing new."""
        for worker in self.workers:
            method.begin(worker)
            if method.background is not None:
                self.resume(Coroutine(worker, method.background(worker), lambda: None), None)

    def draw(self, dim: int) -> Tensor:
        return torch.randn(dim, generator=self.numbers, dtype=torch.float64)

    def run(self) -> None:
        """Run until every worker has done its steps and every message in flight has arrived."""
        while any(worker.step < self.steps for worker in self.workers):
            self.act(self.possible())
        self.ending = True
        while self.deliveries:
            self.act(self.deliveries[:])
        self.ending = False

    def finish(self) -> None:
        if self.method.finish is None:
            return
        unfinished = set(range(len(self.workers)))
        for worker in self.workers:
            ended = lambda rank=worker.rank: unfinished.discard(rank)  # noqa: E731
            self.resume(Coroutine(worker, self.method.finish(worker), ended), None)
        while unfinished:
            self.act(self.deliveries[:])

    def act(self, possible: list[Action]) -> None:
        if not possible:
            raise Deadlock(f"workers have done {[worker.step for worker in self.workers]} of {self.steps} steps")
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
                actions.append(lambda worker=worker: self.begin(worker))
            elif worker.phase == "computing":
                actions.append(lambda worker=worker: self.end(worker))
        for due, coroutine in self.sleeping:
            if coroutine.worker.step >= due:
                actions.append(lambda pair=(due, coroutine): self.wake(*pair))
        for a in self.ready:
            for b in self.ready:
                if a < b and b in self.method.topology.neighbours(a):
                    actions.append(lambda a=a, b=b: self.pair(a, b))
        return actions

    # Actions

    def begin(self, worker: Peer) -> None:
        worker.phase, worker.point = "computing", worker.x.clone()
        if self.method.eval_point is not None:
            self.method.eval_point(worker, worker.point)

    def end(self, worker: Peer) -> None:
        worker.phase = "stepping"
        worker.gradient.copy_(0.3 * worker.point + self.draw(len(worker.x)))
        generator = only_update() if self.method.step is None else self.method.step(worker)
        self.resume(Coroutine(worker, generator, lambda: self.end_step(worker)), None)

    def end_step(self, worker: Peer) -> None:
        self.stepped(worker)
        worker.step += 1
        worker.phase = "rest"

    def wake(self, due: int, coroutine: Coroutine) -> None:
        self.sleeping.remove((due, coroutine))
        self.resume(coroutine, None)

    def pair(self, a: int, b: int) -> None:
        first, second = self.ready.pop(a), self.ready.pop(b)
        self.resume(first, b)
        self.resume(second, a)

    # Effects

    def resume(self, coroutine: Coroutine, answer: Any) -> None:
        while True:
            try:
                effect = coroutine.generator.send(answer)
            except StopIteration:
                coroutine.ended()
                return
            answer = None
            worker = coroutine.worker
            if isinstance(effect, Update):
                displacement = self.draw(len(worker.x))
                worker.x.add_(displacement)
                self.added += displacement
            elif isinstance(effect, Start):
                answer = ticket = Ticket(effect.effect)
                self.arrive(worker, effect.effect, lambda given, ticket=ticket: self.fulfil(ticket, given))
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
            self.waiting[effect.ticket] = coroutine
        elif isinstance(effect, WaitSteps):
            self.sleeping.append((worker.step + effect.count, coroutine))
        elif isinstance(effect, Mean | Gather):
            self.arrive(worker, effect, lambda given: self.resume(coroutine, given))
        elif isinstance(effect, Pair):
            self.ready[worker.rank] = coroutine
        elif isinstance(effect, Swap):
            self.swap(coroutine, effect)
        else:
            raise TypeError(f"{effect!r} is not an effect")

    def fulfil(self, ticket: Ticket, answer: Any) -> None:
        ticket.done, ticket.answer = True, answer
        if ticket in self.waiting:
            self.resume(self.waiting.pop(ticket), answer)

    def arrive(self, worker: Peer, effect: Mean | Gather, give: Callable[[Any], None]) -> None:
        group = effect.group if isinstance(effect, Mean) else None
        members = tuple(range(len(self.workers))) if group is None else group
        assert worker.rank in members
        arrived = self.collectives.setdefault((type(effect), effect.topic, effect.round, group), {})
        assert worker.rank not in arrived, "a worker arrived twice in one collective"
        arrived[worker.rank] = (effect, [tensor.clone() for tensor in sent_by(effect)], give)
        if len(arrived) < len(members) or self.ending:
            return
        self.num_means += 1
        for contribution, copies, _ in arrived.values():
            for tensor, copy in zip(sent_by(contribution), copies, strict=True):
                assert torch.equal(tensor, copy), "a vector changed while it was in flight"
        sent = [arrived[rank][1] for rank in members]
        answer = torch.stack([s[0] for s in sent]).mean(0) if isinstance(effect, Mean) else [tuple(s) for s in sent]
        for rank in members:
            self.deliveries.append(lambda give=arrived[rank][2]: give(answer))

    def swap(self, coroutine: Coroutine, swap: Swap) -> None:
        rank, peer = coroutine.worker.rank, swap.peer
        other = self.swaps.pop((peer, rank), None)
        if other is None:
            self.swaps[rank, peer] = (coroutine, swap)
            return
        self.num_exchanges += 1
        # Now and then the exchange fails for both.
        failed = self.rest.random() < 0.1
        for one, received in ((coroutine, other[1].vector), (other[0], swap.vector)):
            answer = None if failed else received.clone()
            self.deliveries.append(lambda one=one, answer=answer: self.resume(one, answer))


def only_update() -> MethodGenerator:
    yield Update()


def sent_by(effect: Mean | Gather) -> tuple[Tensor, ...]:
    return (effect.vector,) if isinstance(effect, Mean) else effect.tensors
