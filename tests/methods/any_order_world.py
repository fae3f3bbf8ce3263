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

from gossamer.effects import (
    Gather,
    Mean,
    MethodGenerator,
    Pair,
    Shift,
    Shifted,
    Start,
    Swap,
    Ticket,
    Update,
    Wait,
    WaitSteps,
)
from gossamer.methods import Method
from gossamer.methods.contract import check_effect
from gossamer.topology import Topology

Action = Callable[[], None]
Give = Callable[[Any], None]
"""Called with an answer when it reaches the worker."""


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
        self.offsets = tuple(range(dim + 1))
        self.optimizer_state: dict[str, Tensor] = {}
        self.phase = "rest"  # then "computing", then "stepping"
        self.point = x.clone()

    def vector(self, name: str, size: int | None = None) -> Tensor:
        return self.vectors.setdefault(name, self.x.new_zeros(len(self.x) if size is None else size))

    def optimizer_setting(self, name: str) -> Any:
        return {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}[name]

    def read_optimizer_state(self, name: str) -> Tensor:
        return self.optimizer_state.get(name, torch.zeros_like(self.x)).clone()

    def write_optimizer_state(self, name: str, value: Tensor) -> None:
        self.optimizer_state[name] = value.clone()

    def snapshot(self, write: Any = None) -> Tensor:
        sent = self.x.clone()
        if write is not None:
            write(self, sent)
        return sent


class Coroutine:
    def __init__(self, worker: Peer, part: str, generator: Any, ended: Action) -> None:
        self.worker, self.part, self.generator, self.ended = worker, part, generator, ended


class Arrival:
    """What a worker contributes to a collective, and how it gets the answer."""

    def __init__(self, effect: Mean | Gather | Shift, give: Give) -> None:
        self.effect, self.give = effect, give
        self.sent = [tensor.clone() for tensor in sent_by(effect)]
        self.is_answered = False

    def check_unchanged(self) -> None:
        for tensor, copy in zip(sent_by(self.effect), self.sent, strict=True):
            assert torch.equal(tensor, copy), "a vector changed while it was in flight"


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
        self.collectives: dict[Any, dict[int, Arrival]] = {}
        self.last_rounds: dict[tuple[int, str], int] = {}
        self.ready: dict[int, Coroutine] = {}
        self.paired: dict[int, int] = {}
        """Each worker that has a peer and has not swapped with it."""
        self.swaps: dict[tuple[int, int], tuple[Swap, Give]] = {}
        self.num_exchanges = self.num_means = 0
        self.ending = False
        """Messages in flight still arrive, but background parts start nothing new."""
        for worker in self.workers:
            method.begin(worker)
            if method.background is not None:
                self.resume(Coroutine(worker, "background", method.background(worker), lambda: None), None)

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
            self.resume(Coroutine(worker, "finish", self.method.finish(worker), ended), None)
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
        self.resume(Coroutine(worker, "step", generator, lambda: self.end_step(worker)), None)

    def end_step(self, worker: Peer) -> None:
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

    def resume(self, coroutine: Coroutine, answer: Any) -> None:
        while True:
            try:
                effect = coroutine.generator.send(answer)
            except StopIteration:
                coroutine.ended()
                return
            answer = None
            worker = coroutine.worker
            if hasattr(getattr(self.method, coroutine.part), "yields"):  # a part that a test put there has none
                check_effect(self.method, coroutine.part, effect)
            if isinstance(effect, Update):
                displacement = self.draw(len(worker.x))
                worker.x.add_(displacement)
                self.added += displacement
            elif isinstance(effect, Start):
                answer = ticket = Ticket(effect.effect)
                self.communicate(worker, effect.effect, lambda given, ticket=ticket: self.fulfil(ticket, given))
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
        elif isinstance(effect, Pair):
            assert worker.rank not in self.paired, "a worker pairs again before it has swapped"
            self.ready[worker.rank] = coroutine
        else:
            self.communicate(worker, effect, lambda given: self.resume(coroutine, given))

    def fulfil(self, ticket: Ticket, answer: Any) -> None:
        ticket.done, ticket.answer = True, answer
        if ticket in self.waiting:
            self.resume(self.waiting.pop(ticket), answer)

    def communicate(self, worker: Peer, effect: Mean | Gather | Shift | Swap, give: Give) -> None:
        if isinstance(effect, Swap):
            self.swap(worker, effect, give)
        else:
            self.arrive(worker, effect, give)

    def arrive(self, worker: Peer, effect: Mean | Gather | Shift, give: Give) -> None:
        group = None if isinstance(effect, Shift) else effect.group
        members = tuple(range(len(self.workers))) if group is None else group
        assert worker.rank in members
        last = self.last_rounds.get((worker.rank, effect.topic), -1)
        assert effect.round > last, f"round {effect.round} of {effect.topic!r} after round {last}"
        self.last_rounds[worker.rank, effect.topic] = effect.round
        arrived = self.collectives.setdefault((type(effect), effect.topic, effect.round, group), {})
        arrived[worker.rank] = Arrival(effect, give)
        if self.ending:
            return
        if isinstance(effect, Shift):
            self.shift(arrived)
        elif len(arrived) == len(members):
            self.num_means += 1
            for arrival in arrived.values():
                arrival.check_unchanged()
            answer = answer_to([arrived[rank] for rank in members])
            for rank in members:
                self.deliveries.append(lambda give=arrived[rank].give: give(answer))

    def shift(self, arrived: dict[int, Arrival]) -> None:
        """Answer the workers whose two peers have arrived."""
        for rank, arrival in arrived.items():
            shift = arrival.effect
            if arrival.is_answered or shift.to not in arrived or shift.source not in arrived:
                continue
            source = arrived[shift.source]
            assert source.effect.to == rank, "source is not the inverse of to"
            assert arrived[shift.to].effect.source == rank, "source is not the inverse of to"
            arrival.is_answered = True
            self.num_exchanges += shift.to != rank
            arrival.check_unchanged()
            answer = Shifted(source.sent[0].clone(), source.effect.scalars, True)
            self.deliveries.append(lambda give=arrival.give, answer=answer: give(answer))

    def swap(self, worker: Peer, swap: Swap, give: Give) -> None:
        rank, peer = worker.rank, swap.peer
        assert self.paired.pop(rank, None) == peer, "a worker swaps with another than its peer"
        other = self.swaps.pop((peer, rank), None)
        if other is None:
            self.swaps[rank, peer] = (swap, give)
            return
        self.num_exchanges += 1
        theirs, give_theirs = other
        # Now and then the exchange fails for both.
        failed = self.rest.random() < 0.1
        for give_one, received in ((give, theirs), (give_theirs, swap)):
            vector = received.vector.clone()
            answer = None if failed else (vector, received.scalars) if received.scalars else vector
            self.deliveries.append(lambda give_one=give_one, answer=answer: give_one(answer))


def answer_to(arrivals: list[Arrival]) -> Any:
    """Return the answer to a mean or a gather."""
    if isinstance(arrivals[0].effect, Gather):
        return [tuple(arrival.sent) for arrival in arrivals]
    means = [arrival.effect for arrival in arrivals]
    weights = torch.tensor([mean.weight for mean in means], dtype=torch.float64)
    shares = weights / (weights.sum() or 1.0)
    vectors = torch.stack([arrival.sent[0] for arrival in arrivals])
    # Equal weights: the plain mean, as everywhere.
    mean = vectors.mean(0) if bool((weights == 1.0).all()) else shares @ vectors
    if not means[0].scalars:
        return mean
    scalars = torch.tensor([mean.scalars for mean in means], dtype=torch.float64)
    return mean, tuple((shares @ scalars).tolist())


def only_update() -> MethodGenerator:
    yield Update()


def sent_by(effect: Mean | Gather | Shift) -> tuple[Tensor, ...]:
    return effect.tensors if isinstance(effect, Gather) else (effect.vector,)
