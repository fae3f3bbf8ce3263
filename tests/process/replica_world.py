"""A simulated world of replicas that drives the protocol of their background parts (``gossamer.process.replica``).

Whatever can happen next happens in an order that a seed decides: ranks compute, end their steps, receive messages of
their first rank, move their parts of a vector; moves are lost; replicas die in the middle of anything and come back.
All weights of a replica are one number, as are its updates, so a merge that only some of its ranks made shows.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gossamer.effects import Mean, Pair
from gossamer.process.pairwise.screening import Screening, Verdict
from gossamer.process.replica.background import (
    COMPLETED,
    END,
    ENDED,
    EXCHANGE,
    GO_ON,
    LOST,
    TAKE,
    AtBoundary,
    Compare,
    Decide,
    Decision,
    Move,
    Moved,
    Rebuild,
    TakeState,
    run_background,
)
from gossamer.process.replica.boundary import BETWEEN_STEPS, BoundaryLog, Line
from gossamer.testing.worlds.any_order_worker import Peer

DIM = 2
Action = Callable[[], None]


class Rank:
    """One rank: its part of the replica's state (a ``background.Part``), its training and its background part."""

    owns_membership = True

    def __init__(self, world: World, replica: int, shard: int, incarnation: int) -> None:
        self.world, self.replica, self.shard, self.incarnation = world, replica, shard, incarnation
        x = torch.full((DIM,), float(replica + 1), dtype=torch.float64)
        self.worker = Peer(replica, world.method.topology, 0, DIM, x)
        self.log, self.screening = BoundaryLog(), Screening()
        self.calls: deque[Callable[[], Any]] = deque()
        self.inbox: deque[Line | Decision] = deque()
        """From the first rank, in order."""
        self.decisions: deque[Decision] = deque()
        self.phase = "joins" if incarnation else "computes"
        self.needs_state = incarnation > 0
        self.goes_on = False
        """The first rank has said that the replica has joined."""
        self.request: Any = None
        self.rows: list[Any] = []
        """What the ranks have told each other, if this one has not read it yet."""
        self.due = math.inf
        """The step that the background part waits for."""
        self.added = 0.0
        self.merged: set[int] = set()
        self.mean: Moved | None = None
        """What came of the collective that it is in, if the others have sent all."""
        self.members = frozenset(range(world.method.topology.workers))
        self.generation = 0
        """Of the members."""
        self.frozen_at: int | None = None
        self.over = False
        world.method.begin(self.worker)
        self.requests = run_background(self)
        self.go_on(None)

    @property
    def first(self) -> bool:
        return self.shard == 0

    @property
    def mates(self) -> list[Rank]:
        return self.world.ranks[self.replica]

    @property
    def tells(self) -> bool:
        """Whether it waits for what the others tell."""
        return isinstance(self.request, Compare) and not self.rows

    # The part

    def start(self) -> Any:
        return self.world.method.background(self.worker)

    def resume(self, generator: Any, answer: Any) -> Any:
        return generator.send(answer)

    def judge(self, decision: Decision, rows: Any) -> bool:
        norms = [sum(row[column] for row in rows) ** 0.5 for column in (1, 2)]
        merges = self.screening.judge(decision.peer, *norms) is Verdict.MERGE
        if merges:
            self.merged.add(decision.number)
        return merges

    def take_over(self, state: Any) -> None:
        x, step = state
        self.worker.x.copy_(x)
        self.worker.vectors.clear()
        self.needs_state, self.taken_at = False, step

    def freeze(self) -> None:
        assert self.frozen_at is None
        self.frozen_at = self.worker.step
        # All ranks of a replica give the state of one boundary.
        frozen = [mate.frozen_at for mate in self.mates if mate.frozen_at is not None]
        assert set(frozen) == {self.frozen_at}

    def thaw(self) -> None:
        assert self.frozen_at is not None
        self.frozen_at = None

    # The background part

    def go_on(self, answer: Any) -> None:
        try:
            self.request = self.requests.send(answer)
        except StopIteration:
            self.request, self.over = None, True
            return
        if isinstance(self.request, AtBoundary):
            self.log.submit()
            self.calls.append(self.request.act)

    def decide(self, decision: Decision) -> None:
        for mate in self.mates[1:]:
            mate.inbox.append(decision)
        self.go_on(decision)

    # Training

    def gradient(self) -> None:
        self.phase = "steps"
        if self.first:
            self.close(self.worker.step)

    def close(self, step: int, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        line = self.log.close(step, goes_on)
        for mate in self.mates[1:]:
            if line is not None:
                mate.inbox.append(line)

    def receive(self) -> None:
        message = self.inbox.popleft()
        if isinstance(message, Line):
            self.log.hear(message)
        else:
            self.decisions.append(message)

    def cross(self) -> None:
        """The optimizer has made its update: pass a boundary."""
        line = self.log.next()
        assert line is not None
        steps = self.phase == "steps"
        assert steps == (line.step != BETWEEN_STEPS)
        assert not steps or line.step == self.worker.step
        if steps:
            update = self.world.update(self.replica, self.worker.step)
            self.worker.x.add_(update)
            self.added += update
            self.worker.time = self.worker.step + 1.0
        calls = [self.calls.popleft() for _ in range(line.num_calls - self.log.num_run)]
        self.log.pass_line()
        for _, number in line.gives:
            self.world.given[number, self.shard] = (self.worker.x.clone(), self.worker.step)
        for act in calls:
            self.go_on(act())
        if steps:
            self.worker.step += 1
            self.phase = "computes"
            self.world.note(self)
        elif line.goes_on:
            self.phase = "computes"


class World:
    def __init__(self, method: Any, shards: int, seed: int, steps: int, losses: float = 0.0) -> None:
        self.method, self.steps, self.losses, self.random = method, steps, losses, random.Random(seed)
        self.given: dict[tuple[int, int], Any] = {}
        self.seen: dict[tuple[int, int, int], tuple[Any, ...]] = {}
        self.num_exchanges = 0
        """Numbers of exchanges count up."""
        self.num_means = 0
        self.requested = [0] * shards
        """The newest generation of members that somebody has requested, by shard."""
        self.met: dict[int, tuple[Rank, Rank]] = {}
        self.dead: set[int] = set()
        self.ranks: list[list[Rank]] = []
        for replica in range(method.topology.workers):
            self.ranks.append([])
            self.ranks[replica] += [Rank(self, replica, shard, 0) for shard in range(shards)]

    def update(self, replica: int, step: int) -> float:
        return (replica + 1) * (1 + step % 3) / 8

    def alive(self) -> list[Rank]:
        return [rank for ranks in self.ranks for rank in ranks if rank.replica not in self.dead]

    def note(self, rank: Rank) -> None:
        """Check that this rank has the same weights as the others of its replica had after this step."""
        x, z = rank.worker.x, rank.worker.vectors.get("z", torch.zeros(DIM))
        now = (*x.tolist(), *z.tolist())
        assert len(set(x.tolist())) == 1
        key = (rank.replica, rank.incarnation, rank.worker.step)
        assert self.seen.setdefault(key, now) == now, f"torn: {key}"

    # What can happen

    def possible(self) -> list[Action]:
        actions: list[Action] = []
        for rank in self.alive():
            if rank.phase == "computes" and all(mate.worker.step >= self.steps for mate in rank.mates):
                rank.phase = "ends"
        for rank in self.alive():
            actions += self.of_training(rank)
            if rank.inbox:
                actions.append(rank.receive)
            request = rank.request
            if isinstance(request, Decide) and not rank.first and rank.decisions:
                actions.append(lambda rank=rank: rank.go_on(rank.decisions.popleft()))
            elif isinstance(request, Decide) and rank.first:
                actions += self.of_decision(rank, request.effect)
            elif isinstance(request, Move | TakeState):
                actions += self.of_move(rank, request)
            elif isinstance(request, Rebuild):
                actions += self.of_rebuild(rank)
            elif isinstance(request, Compare) and (rank.rows or all(mate.tells for mate in rank.mates)):
                actions.append(partial(self.compare, rank))
        return actions

    def of_training(self, rank: Rank) -> list[Action]:
        done = rank.worker.step >= self.steps
        if rank.phase == "computes" and not done:
            # Gradients need all ranks of the replica.
            return [rank.gradient] if all(mate.worker.step >= rank.worker.step for mate in rank.mates) else []
        actions: list[Action] = []
        if rank.phase in ("joins", "ends") and rank.first:
            joined = rank.phase == "joins" and not rank.needs_state
            if not rank.goes_on and (joined or rank.log.has_more):
                actions.append(partial(rank.close, BETWEEN_STEPS, joined))
        if rank.log.next() is not None and (rank.phase == "steps") == (rank.log.next().step != BETWEEN_STEPS):
            actions.append(rank.cross)
        return actions

    def all_ended(self) -> bool:
        return all(rank.phase == "ends" for rank in self.alive())

    def of_decision(self, rank: Rank, effect: Any) -> list[Action]:
        if self.all_ended():
            return [partial(rank.decide, Decision(END))]
        if not isinstance(effect, Pair):
            if rank.due == math.inf:
                rank.due = rank.worker.step + effect.count
            return [partial(self.wake, rank)] if rank.worker.step >= rank.due else []
        return [
            partial(self.pair, rank, self.ranks[peer][0])
            for peer in self.method.topology.neighbours(rank.replica)
            if peer not in self.dead and self.fits(rank, self.ranks[peer][0])
        ]

    def fits(self, rank: Rank, peer: Rank) -> bool:
        if rank.needs_state:
            return not peer.needs_state and peer.worker.step > 0
        wants = isinstance(peer.request, Decide) and isinstance(peer.request.effect, Pair)
        return wants and not peer.needs_state

    def wake(self, rank: Rank) -> None:
        rank.due = math.inf
        rank.decide(Decision(GO_ON))

    def pair(self, rank: Rank, peer: Rank) -> None:
        self.num_exchanges += 1
        self.met[self.num_exchanges] = (rank, peer)
        if rank.needs_state:
            peer.log.give(rank.replica, self.num_exchanges)
            rank.decide(Decision(TAKE, peer.replica, self.num_exchanges))
        else:
            rank.decide(Decision(EXCHANGE, peer.replica, self.num_exchanges))
            peer.decide(Decision(EXCHANGE, rank.replica, self.num_exchanges))

    def of_mean(self, rank: Rank) -> list[Action]:
        """A mean of the same rank of all replicas completes at once, and each of them learns of it later."""
        if rank.mean is not None:
            return [partial(self.learn, rank)]
        if self.some_ended():
            return [partial(rank.go_on, Moved((ENDED,)))]
        if self.requested[rank.shard] > rank.generation or rank.members & self.dead:
            self.requested[rank.shard] = max(self.requested[rank.shard], rank.generation + 1)
            return [partial(rank.go_on, Moved((LOST,)))]
        members = [self.ranks[replica][rank.shard] for replica in rank.members]
        together = all(self.sends_mean(member) and member.generation == rank.generation for member in members)
        return [partial(self.complete, members)] if together else []

    def of_rebuild(self, rank: Rank) -> list[Action]:
        """The same rank of all replicas alive agrees on the members, once all of them rebuild."""
        if self.some_ended():
            return [partial(rank.go_on, Moved((ENDED,)))]
        self.requested[rank.shard] = max(self.requested[rank.shard], rank.generation + 1)
        members = [ranks[rank.shard] for ranks in self.ranks if ranks[0].replica not in self.dead]
        return [partial(self.rebuild, members)] if all(isinstance(m.request, Rebuild) for m in members) else []

    def rebuild(self, members: list[Rank]) -> None:
        replicas = frozenset(member.replica for member in members)
        for member in members:
            member.members, member.generation = replicas, self.requested[member.shard]
            lost = self.random.random() < self.losses
            member.go_on(Moved((LOST if lost else COMPLETED, float(sum(1 << replica for replica in replicas)))))

    def some_ended(self) -> bool:
        return any(rank.over for rank in self.alive())

    def sends_mean(self, rank: Rank) -> bool:
        return isinstance(rank.request, Move) and isinstance(rank.request.effect, Mean) and rank.mean is None

    def complete(self, members: list[Rank]) -> None:
        effects = [member.request.effect for member in members]
        # Rounds count from the first one of a generation, so those of different replicas may be apart.
        assert self.losses or len({(effect.round, effect.topic) for effect in effects}) == 1
        mean = torch.stack([effect.vector for effect in effects]).mean(0)
        self.num_means += 1
        for member in members:
            # It may complete for some and fail for others.
            lost = self.random.random() < self.losses
            member.mean = Moved((LOST,)) if lost else Moved((COMPLETED,), mean.clone())
            if lost:
                self.requested[member.shard] = max(self.requested[member.shard], member.generation + 1)

    def learn(self, rank: Rank) -> None:
        assert rank.mean is not None
        moved, rank.mean = rank.mean, None
        rank.go_on(moved)

    def of_move(self, rank: Rank, request: Move | TakeState) -> list[Action]:
        if isinstance(request, Move) and isinstance(request.effect, Mean):
            return self.of_mean(rank)
        decision = request.decision
        if any(self.ranks[end.replica][0] is not end or end.replica in self.dead for end in self.met[decision.number]):
            return [partial(rank.go_on, Moved((LOST,)))]
        if isinstance(request, TakeState):
            state = self.given.get((decision.number, rank.shard))
            return [] if state is None else [partial(self.take, rank, state)]
        peer = self.ranks[decision.peer][rank.shard]
        both = isinstance(peer.request, Move) and peer.request.decision.number == decision.number
        return [partial(self.move, rank, peer)] if both else []

    def take(self, rank: Rank, state: Any) -> None:
        lost = self.random.random() < self.losses
        rank.go_on(Moved((LOST,)) if lost else Moved((COMPLETED,), state))

    def move(self, *ends: Rank) -> None:
        """Both ends of a connection agree on whether an exchange took place."""
        if self.random.random() < self.losses:
            for rank in ends:
                rank.go_on(Moved((LOST,)))
            return
        vectors = [rank.request.effect.vector.clone() for rank in ends]
        for rank, own, theirs in zip(ends, vectors, reversed(vectors), strict=True):
            rank.go_on(Moved((COMPLETED, float(own @ own), float(theirs @ theirs)), theirs))

    def compare(self, rank: Rank) -> None:
        """The ranks of a replica get what all of them have told, each at a time of its own."""
        if not rank.rows:
            rows = [mate.request.row for mate in rank.mates]
            for mate in rank.mates:
                mate.rows = rows
        rows, rank.rows = rank.rows, []
        rank.go_on(rows)

    def revive(self, replica: int) -> None:
        self.dead.discard(replica)
        shards, incarnation = len(self.ranks[replica]), self.ranks[replica][0].incarnation + 1
        self.ranks[replica] = []
        self.ranks[replica] += [Rank(self, replica, shard, incarnation) for shard in range(shards)]

    def run(self, deaths: tuple[int, ...] = (), comes_back: bool = True) -> None:
        """Run until all background parts have ended. ``deaths``: replicas that die in the middle, and come back."""
        dies = {self.random.randrange(50, 400): replica for replica in deaths}
        returns = {moment + self.random.randrange(1, 200): replica for moment, replica in dies.items()}
        count = 0
        while not all(rank.over for rank in self.alive()):
            possible = self.possible()
            assert possible, f"nobody can go on: {[(r.replica, r.shard, r.phase, r.request) for r in self.alive()]}"
            self.random.choice(possible)()
            count += 1
            if count in dies:
                self.dead.add(dies[count])
            if count in returns and comes_back:
                self.revive(returns[count])
