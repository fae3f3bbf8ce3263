"""A sound method, and methods that break one rule each."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import weakref

from gossamer.effects import Gather, Mean, Pair, Start, Swap, Update, Wait, WaitSteps, yields
from gossamer.methods import Method


class Sound(Method):
    """Every step averages with all others, one step late."""

    name = "sound"
    summary = "averages one step late"

    @yields(Update, Mean, Start, Wait)
    def step(self, worker):
        yield from self.merge(worker)
        yield Update()
        sent = worker.vector("sent").copy_(worker.x)
        worker.tickets["mix"] = yield Start(Mean(sent, round=worker.step, topic="model"))

    def merge(self, worker):
        ticket = worker.tickets.get("mix")
        if ticket is not None:
            mean = yield Wait(ticket)
            worker.tickets.pop("mix", None)
            worker.x.add_(mean).sub_(worker.vector("sent"))

    @yields(Wait)
    def finish(self, worker):
        yield from self.merge(worker)


# The contract


class SaysNothing(Sound):
    """``step`` does not say what it yields."""

    def step(self, worker):
        yield Update()


class GivesUpTheUnknown(Sound):
    gives_up = ("men",)


class YieldsMoreThanItSays(Sound):
    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        gathered = yield Gather((worker.x,), round=worker.step)
        worker.x.copy_(sum(x for (x,) in gathered) / len(gathered))

    finish = None


class UpdatesTwice(Sound):
    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        worker.x.copy_((yield Mean(worker.x, round=worker.step)))
        yield Update()

    finish = None


class RoundOfTheWorker(Sound):
    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        worker.x.copy_((yield Mean(worker.x, round=worker.step + worker.rank, topic="model")))

    finish = None


class TopicOfTheWorker(Sound):
    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        worker.x.copy_((yield Mean(worker.x, round=worker.step, topic=f"model of {worker.rank}")))

    finish = None


class GroupAtRandom(Sound):
    """Each worker draws the group from a generator of its own."""

    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        other = int(worker.rng.integers(worker.num_workers))
        group = tuple(sorted({worker.rank, other}))
        worker.x.copy_((yield Mean(worker.x, round=worker.step, topic="model", group=group)))

    finish = None


class FinishOfOne(Sound):
    """Only worker 0 averages in the end."""

    @yields(Wait, Mean)
    def finish(self, worker):
        yield from self.merge(worker)
        if worker.rank == 0:
            yield Mean(worker.x, round=worker.step, topic="last")


class ChangesWhatItSent(Sound):
    """It sends ``x`` itself, and the next step changes it while it is in flight."""

    @yields(Update, Mean, Start, Wait)
    def step(self, worker):
        yield Update()
        yield from self.merge(worker)
        worker.vector("sent").copy_(worker.x)
        worker.tickets["mix"] = yield Start(Mean(worker.x, round=worker.step, topic="model"))


class UsesAnEarlierMean(Sound):
    """It applies a mean after it has started the next one, whose answer takes its memory."""

    @yields(Update, Mean, Start, Wait)
    def step(self, worker):
        yield Update()
        ticket = worker.tickets.get("mix")
        mean = None if ticket is None else (yield Wait(ticket))
        earlier = worker.vector("earlier").copy_(worker.vector("sent"))
        sent = worker.vector("sent").copy_(worker.x)
        worker.tickets["mix"] = yield Start(Mean(sent, round=worker.step, topic="model"))
        if mean is not None:
            worker.x.add_(mean).sub_(earlier)


class WritesToTheMean(Sound):
    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        mean = yield Mean(worker.x, round=worker.step, topic="model")
        worker.x.copy_(mean.mul_(1.0 + worker.rank).div_(1.0 + worker.rank))
        mean.zero_()

    finish = None


class CountsOnSelf(Sound):
    """The number of the round is kept in the method, which all workers share."""

    def __init__(self, config, topology):
        super().__init__(config, topology)
        self.rounds = [0] * topology.workers

    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        self.rounds[worker.rank] += 1
        worker.x.copy_((yield Mean(worker.x, round=self.rounds[worker.rank], topic="model")))

    finish = None


SEEN = {}


class RemembersInAGlobal(Sound):
    """What a worker did last is kept in a variable of the module, by its rank."""

    gives_up = ("alone",)

    def begin(self, worker):
        SEEN.pop(worker.rank, None)

    @yields(Update)
    def step(self, worker):
        worker.gradient.add_(SEEN.get(worker.rank, worker.gradient), alpha=0.5)
        SEEN[worker.rank] = worker.gradient + 0.0
        yield Update()

    @yields(WaitSteps, Mean)
    def background(self, worker):
        while True:
            yield WaitSteps(1)
            sent = worker.snapshot()
            number = worker.scalars.get("merges", 0)
            mean = yield Mean(sent, round=int(number), topic="model")
            worker.x.add_(mean).sub_(sent)
            worker.scalars["merges"] = number + 1

    finish = None


# What training does


class ThrowsDice(Sound):
    """How often it exchanges depends on Python's global random numbers."""

    step = finish = None

    @yields(Pair, Swap)
    def background(self, worker):
        while True:
            peer = yield Pair(0.5 + random.random())
            sent = worker.snapshot()
            received = yield Swap(sent, peer)
            if received is not None:
                worker.x.add_(sent, alpha=-0.5).add_(received, alpha=0.5)


class NeverExchanges(ThrowsDice):
    @yields(Pair, Swap)
    def background(self, worker):
        yield Pair(1e-9)


class Overwrites(Sound):
    """The steps that were made during the averaging are lost."""

    step = finish = None

    @yields(WaitSteps, Mean)
    def background(self, worker):
        while True:
            yield WaitSteps(1)
            number = worker.scalars.get("merges", 0)
            mean = yield Mean(worker.snapshot(), round=int(number), topic="model")
            worker.x.copy_(mean)
            worker.scalars["merges"] = number + 1


class LosesTheLast(Sound):
    """Half of the model is in flight, and nobody waits for it in the end."""

    @yields(Update, Mean, Start, Wait)
    def step(self, worker):
        ticket = worker.tickets.pop("half", None)
        if ticket is not None:
            worker.x.add_((yield Wait(ticket)))
        yield Update()
        worker.x.mul_(0.5)
        sent = worker.vector("sent").copy_(worker.x)
        worker.tickets["half"] = yield Start(Mean(sent, round=worker.step, topic="model"))

    finish = None


class DoesNotShare(Sound):
    """A momentum of the averaged gradient is equal on all workers, but a worker that joins does not get it."""

    sends_models = False
    gives_up = ("alone",)

    @yields(Update, Mean)
    def step(self, worker):
        mean = yield Mean(worker.gradient, round=worker.step, topic="gradient")
        momentum = worker.vector("momentum").mul_(0.9).add_(mean)
        worker.gradient.copy_(momentum)
        yield Update()

    finish = None


class ChangesAlone(Sound):
    """One worker alone trains at half the learning rate."""

    @yields(Update, Mean)
    def step(self, worker):
        worker.gradient.mul_(0.5)
        yield Update()
        worker.x.copy_((yield Mean(worker.x, round=worker.step, topic="model")))

    finish = None


class StaysApart(Sound):
    """Workers average half of their parameters only."""

    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        half = worker.x[: len(worker.x) // 2]
        half.copy_((yield Mean(half, round=worker.step, topic="model")))

    finish = None


class RaisesAnError(Sound):
    @yields(Update)
    def step(self, worker):
        yield Update()
        worker.no_such_thing()


# What shows with real processes only


class LooksAtTheClock(Sound):
    """What a step does depends on the worker's time, although all wait for each other."""

    gives_up = ("alone",)

    @yields(Update, Mean)
    def step(self, worker):
        worker.gradient.mul_(1.0 + 0.1 * (worker.time % 1.0))
        yield Update()
        worker.x.copy_((yield Mean(worker.x, round=worker.step, topic="model")))

    finish = None


HIDDEN = weakref.WeakKeyDictionary()


class HidesItsState(Sound):
    """It keeps a vector of each worker, but not in the worker: checkpoints miss it."""

    gives_up = ("alone",)

    @yields(Update, Mean)
    def step(self, worker):
        last = HIDDEN.get(worker)
        HIDDEN[worker] = worker.gradient + 0.0
        if last is not None:
            worker.gradient.add_(last, alpha=0.5)
        yield Update()
        worker.x.copy_((yield Mean(worker.x, round=worker.step, topic="model")))

    finish = None


class FailsInAProcess(Sound):
    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        if multiprocessing.parent_process() is not None and worker.step == 3:
            raise ValueError("not in a process")
        worker.x.copy_((yield Mean(worker.x, round=worker.step, topic="model")))

    finish = None


class DiesInAProcess(FailsInAProcess):
    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        if multiprocessing.parent_process() is not None and worker.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.x.copy_((yield Mean(worker.x, round=worker.step, topic="model")))


class StopsInAProcess(FailsInAProcess):
    @yields(Update, Mean)
    def step(self, worker):
        yield Update()
        if multiprocessing.parent_process() is not None and worker.step == 3:
            signal.pause()
        worker.x.copy_((yield Mean(worker.x, round=worker.step, topic="model")))
