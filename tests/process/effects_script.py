"""Methods for one effect each, and a worker that runs one of them and reports what it got."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from gossamer.effects import Gather, Mean, Pair, Shift, Start, Swap, Update, Wait, WaitSteps, yields
from gossamer.errors import InputError
from gossamer.methods import Method, MethodConfig
from gossamer.process.runtime.swarm import Swarm
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.process.store.rank_info import find_rank_info
from gossamer.topology import build

STAYS_S = 100.0

seen: list[Any] = []
"""What the method of this process has seen."""


class OneEffect(Method):
    name = "one-effect"
    summary = "for a test"


class WeightedMeans(OneEffect):
    @yields(Mean, Update)
    def step(self, worker):
        mine = torch.full((5,), float(worker.rank + 1))
        weight = float(worker.rank)
        mean, scalars = yield Mean(mine, round=worker.step, weight=weight, scalars=(10.0 * worker.rank, 1.0))
        seen.append((mean.tolist(), scalars))
        yield Update()


class TopicsInAnyOrder(OneEffect):
    """Every worker starts the two averagings in another order."""

    @yields(Mean, Start, Wait, Update)
    def step(self, worker):
        vectors = {"one": torch.full((3,), float(worker.rank)), "ten": torch.full((4,), 10.0 * worker.rank)}
        topics = ["one", "ten"] if worker.rank % 2 else ["ten", "one"]
        for topic in topics:
            worker.tickets[topic] = yield Start(Mean(vectors[topic], round=worker.step, topic=topic))
        for topic in topics:
            seen.append((topic, (yield Wait(worker.tickets.pop(topic))).tolist()))
        yield Update()


class GathersInGroups(OneEffect):
    @yields(Gather, Update)
    def step(self, worker):
        group = (0, 1) if worker.rank < 2 else tuple(range(2, worker.num_workers))
        tensors = (torch.tensor([float(worker.rank)]), torch.tensor([worker.rank, worker.step]))
        gathered = yield Gather(tensors, round=worker.step, group=group)
        seen.append([[tensor.tolist() for tensor in each] for each in gathered])
        yield Update()


class ShiftsAlongARing(OneEffect):
    @yields(Shift, Start, Wait, Update)
    def step(self, worker):
        n, rank = worker.num_workers, worker.rank
        sent = torch.full((4,), float(10 * worker.step + rank))
        shift = Shift(sent, (rank + 1) % n, (rank - 1) % n, round=worker.step, scalars=(0.5 + rank,))
        if worker.step % 2:
            shifted = yield Wait((yield Start(shift)))
        else:
            shifted = yield shift
        vector = None if shifted.vector is None else shifted.vector.tolist()
        seen.append((vector, shifted.scalars, shifted.delivered))
        yield Update()


class StartsSwaps(OneEffect):
    """Exchanges something else than the model, with scalars, while it waits for a step."""

    shared = ("marks",)

    def begin(self, worker):
        seen.append(("begin", worker.vector("marks", 7).tolist()))
        worker.vector("marks", 7).fill_(7.0)

    @yields(Pair, Swap, Start, Wait, WaitSteps)
    def background(self, worker):
        while True:
            peer = yield Pair(float("inf"))
            ticket = yield Start(Swap(torch.full((3,), float(worker.rank)), peer, scalars=(2.5 * worker.rank,)))
            yield WaitSteps(1)
            answer = yield Wait(ticket)
            if answer is not None:
                seen.append((peer, answer[0].tolist(), answer[1]))


class MeansInBothParts(OneEffect):
    """A mean in the foreground, and another one in the background."""

    @yields(Mean, Update)
    def step(self, worker):
        mean = yield Mean(worker.gradient, round=worker.step, topic="gradient")
        worker.gradient.copy_(mean)
        yield Update()

    @yields(WaitSteps, Mean)
    def background(self, worker):
        count = 0
        while True:
            yield WaitSteps(2)
            mean = yield Mean(torch.full((2,), float(worker.rank)), round=count, topic="ranks")
            seen.append(mean.tolist())
            count += 1


class OptimizerState(OneEffect):
    @yields(Update)
    def step(self, worker):
        yield Update()
        momentum = worker.read_optimizer_state("momentum_buffer")
        seen.append((worker.offsets, float((momentum - worker.gradient).abs().max())))
        worker.write_optimizer_state("momentum_buffer", torch.zeros_like(momentum))


class OtherTopics(OneEffect):
    @yields(Mean, Update)
    def step(self, worker):
        yield Mean(worker.gradient, round=worker.step, topic=f"topic {worker.rank % 2}")
        yield Update()


class OtherRounds(OneEffect):
    @yields(Mean, Update)
    def step(self, worker):
        yield Mean(worker.gradient, round=worker.step, topic="same")
        yield Mean(worker.gradient, round=100 + (worker.rank % 2 if worker.step == 2 else 0), topic="same")
        yield Update()


class OtherGroups(OneEffect):
    @yields(Mean, Update)
    def step(self, worker):
        group = (0, 1) if worker.rank == 0 else (0, 1, 2)
        yield Mean(worker.gradient, round=worker.step, group=group)
        yield Update()


class OtherLengths(OneEffect):
    @yields(Mean, Update)
    def step(self, worker):
        yield Mean(torch.zeros(3 + worker.rank % 2), round=worker.step)
        yield Update()


class OtherSwaps(OneEffect):
    @yields(Pair, Swap)
    def background(self, worker):
        while True:
            peer = yield Pair(float("inf"))
            yield Swap(torch.zeros(3 + worker.rank % 2), peer)


class FailsInTheBackground(OneEffect):
    @yields(WaitSteps)
    def background(self, worker):
        yield WaitSteps(2)
        raise ZeroDivisionError("in the background")


class Undeclared(OneEffect):
    @yields(Update)
    def step(self, worker):
        yield Mean(worker.x, round=worker.step)
        yield Update()


def run_method(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    rank_info = find_rank_info()
    topology = build("complete", workers=rank_info.workers, seed=0)
    method = globals()[order["effects"]](MethodConfig(), topology)
    swarm = Swarm(WorkerRuntime(model, optimizer, method, topology, rank_info, 0))
    out.send({"at": "joined", "seen": list(seen)})
    dies, at = order.get("dies", (None, 0))
    try:
        for step in range(order["steps"]):
            if "until" in order and order["until"].exists():
                break
            if (dies, at) == (rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 3)).sum().backward()
            time.sleep(order.get("compute_s", 0.01))
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 9:
                out.send({"at": "step", "step": step + 1, "seen": len(seen)})
        swarm.finish()
        weights = [parameter.tolist() for parameter in model.parameters()]
        out.send({"at": "finished", "seen": seen, "weights": weights, "bytes": swarm.metrics().bytes_sent})
    except (InputError, ZeroDivisionError) as error:
        out.send({"at": "failed", "why": str(error), "kind": type(error).__name__})
        # The others find out by themselves. The test ends this process.
        time.sleep(STAYS_S)
