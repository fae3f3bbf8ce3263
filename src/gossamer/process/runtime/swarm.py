"""What ``gossamer.join`` gives back: this worker's part in training one model on many."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.errors import InputError
from gossamer.methods import Method
from gossamer.process.collectives import nccl
from gossamer.process.collectives.groups import Groups
from gossamer.process.collectives.membership import BACKGROUND, FOREGROUND, StepRetry, TrainingEnded
from gossamer.process.metrics import Metrics
from gossamer.process.pairwise.exchanges import PairwiseExchanges, absurd
from gossamer.process.runtime.driver import Driver
from gossamer.process.runtime.flat_model import FlatModel
from gossamer.process.runtime.process_worker import ProcessWorker
from gossamer.process.runtime.staging import Staging
from gossamer.process.runtime.step_recorder import StepRecorder
from gossamer.process.runtime.worker_state import WorkerState, is_finite
from gossamer.process.store.heartbeats import Heartbeats
from gossamer.process.store.rank_info import RankInfo, own_host
from gossamer.recording import Recorder
from gossamer.topology import Topology

POLL_S = 0.1
"""How often a worker looks after its connections, beside its training."""

GRACE_S = 0.5
"""How long a worker that is done waits for the others before it leaves their groups."""

STATE_WAIT_S = 30.0
"""How long a worker that comes back waits for a peer's weights."""

TICKETS = 64
"""So many mini-batches are asked for ahead at most, where workers share them out."""

CLOSE_S = 1.0
END_POLL_S = 0.01

HAS_THE_MEAN = 2
"""A worker's standing at the end: 0 where its weights do not count, 1 where they do, and this one afterwards."""

Batch = TypeVar("Batch")


class Swarm:
    """This worker's part in the training. Made by ``gossamer.join``; a context manager that ends with ``finish``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: Method,
        topology: Topology,
        rank_info: RankInfo,
        seed: int,
        transport: str = "gloo",
        recorder: Recorder | None = None,
    ) -> None:
        self.method, self.topology, self.rank_info = method, topology, rank_info
        has_background = type(method).background is not Method.background
        self.flat_model = FlatModel(
            model, optimizer, has_background or type(method).eval_point is not Method.eval_point
        )
        self.worker = ProcessWorker(rank_info.rank, topology, seed, self.flat_model)
        self.step_recorder = self.worker.step_recorder = StepRecorder(rank_info.rank, recorder)
        self.state = WorkerState(method, self.flat_model, self.worker)
        if transport == "nccl":
            nccl.check(self.flat_model.device)
        self.staging = Staging(self.flat_model.device, nccl=transport == "nccl")
        self._counts = Metrics()
        self._done = self._finished = False
        self._taken = 0
        self._met = False
        self._standing = 0
        self._spoken = False
        """The method's last words have begun: they cannot be begun again."""
        self.store = rank_info.connect_store()
        self.heartbeats = Heartbeats(rank_info.rank, self.store)
        # Whoever averages beside the training also rebuilds its groups; it never holds up a step.
        owner = BACKGROUND if has_background and not method.lockstep else FOREGROUND
        self.groups = Groups(
            rank_info.rank,
            topology.workers,
            self.store,
            self.heartbeats,
            self.state,
            owner,
            stopped=lambda: self.driver.stopped,
            ended=lambda: self.driver.ended,
        )
        neighbours = topology.neighbours(rank_info.rank) if method.pairwise else ()
        self.exchanges = PairwiseExchanges(
            self.state,
            neighbours,
            self.store,
            self.staging,
            self._counts,
            self.heartbeats.dead,
            lambda: self.driver.stopped,
            self.step_recorder,
        )
        self.driver = Driver(self.state, self.groups, self.exchanges, self.staging, self._counts, self.step_recorder)
        # Whoever does not finish, or is interrupted, lets go at the process's end: threads must not outlive it.
        atexit.register(self.close)
        self._tender = threading.Thread(target=self._tend, name="gossamer-tend", daemon=True)
        self._tender.start()
        try:
            self._meet(owner)
        except BaseException:
            self.close()
            raise
        if self.flat_model.two_vectors:
            method.eval_point(self.worker, self.flat_model.weights)
            self.flat_model.load_weights(self.flat_model.weights)

    @property
    def events(self) -> list[str]:
        """What happened so far, one line each: groups rebuilt, messages refused, weights taken over."""
        return self.state.events

    # Meeting the others

    def _meet(self, owner: str) -> None:
        """Everybody starts from rank 0's weights and buffers; a worker that comes back takes those of the others."""
        address = self.store.host_own(own_host(self.rank_info.host))
        self._address = f"{address[0]} {address[1]}"
        self._say_where()
        self.store.moved.append(self._say_again)
        self.heartbeats.beat()
        # Nobody says that the run has started before everybody was there: who hears it and was not comes back.
        self.groups.train.given_up = lambda: self.store.get("started") is not None
        self.state.needs_state = self.rank_info.rank != 0
        try:
            with contextlib.suppress(StepRetry):
                self.groups.train.regroup(owner)
            self._met = True
            self._say_again()
            self.state.needs_state = False
        except TrainingEnded:
            self._come_back(owner)
            self._met = True
        self.groups.train.given_up = lambda: False
        self.step_recorder.agree(self.store)
        self.heartbeats.all_born = True
        for rank in self.groups.everybody:
            self._look_at(rank)

    def _come_back(self, owner: str) -> None:
        """The run goes on already: take over the others' state."""
        self.state.needs_state = True
        self.groups.train.given_up = lambda: False
        self.events.append("came back: taking over from the others")
        if self.method.pairwise:
            self.exchanges.pairing.needs_state = True
            self.driver.start_background()
            self._await_weights()
        else:
            self.groups.train.come_back()
            with contextlib.suppress(StepRetry):
                self.groups.train.regroup(owner)
        if self.state.needs_state:
            self.events.append("nobody is left to take over from: this worker's weights do not count in the end")

    def _say_where(self) -> None:
        """Leave where our own store is, and whether we are done: a worker that was here before us may have been."""
        self.store.set(f"address/{self.rank_info.rank}", self._address)
        self.store.set(f"done/{self.rank_info.rank}", str(int(self._done)))

    def _say_done(self) -> None:
        """Once we are; again and again: the store may be another by now, and what was said at a move may be older."""
        if self._done:
            self.store.set(f"done/{self.rank_info.rank}", "1")

    def _say_again(self) -> None:
        """Leave all our entries at a store that may be a new one.

        That the run goes on is said last: a worker that comes back, and hears it, finds the others' generation.
        """
        self._say_where()
        self.heartbeats.beat()
        if self._met:
            self.groups.republish()
            if self._taken:
                self.store.claim("batches", str(self._taken))
            self.store.set("started", "1")

    def _look_at(self, rank: int) -> None:
        """Whether ``rank`` is alive, and where its store is now."""
        self.heartbeats.dead(rank)
        found = self.store.get(f"address/{rank}")
        if found is not None:
            host, port = found.decode().split()
            self.store.spares[rank] = (host, int(port))

    def _await_weights(self) -> None:
        until = time.monotonic() + STATE_WAIT_S
        while self.exchanges.pairing.needs_state and time.monotonic() < until and not self._all_done():
            time.sleep(0.01)
        self.exchanges.pairing.needs_state = False

    # Beside the training

    def _tend(self) -> None:
        turns = itertools.cycle(self.groups.everybody)
        while not self._finished:
            # Whatever the network does to one look, there is a next one.
            with contextlib.suppress(RuntimeError):
                self.store.seek_earlier()
                self.heartbeats.beat()
                self._say_done()
                self._look_at(next(turns))
                self.exchanges.poll()
                self.groups.poll(training=not self._done)
            time.sleep(POLL_S)

    # What the user calls

    def metrics(self) -> Metrics:
        """How this worker fares."""
        self._counts.lost = self.exchanges.peers.lost
        self._counts.peers_alive = len(self.groups.everybody) - 1 - len(self.heartbeats.lost)
        return self._counts

    def state_dict(self) -> dict[str, Any]:
        """Everything this worker is, beside its model's and optimizer's own ``state_dict``: for a checkpoint.

        What is under way is waited for and kept too. Tensors, and what JSON can hold, in nested dictionaries.
        """
        return {**self.state.state_dict(), "batches": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave; on all workers, each its own, before the first step."""
        if self._counts.steps or self.driver.started:
            raise InputError("load_state_dict comes too late: call it right after join, before the first step")
        self.state.load_state_dict(state)
        self._taken = state["batches"]
        self.store.claim("batches", str(self._taken))

    def batches(self, loader: Iterable[Batch], total_steps: int) -> Iterator[Batch]:
        """Mini-batches until all workers together have made ``total_steps`` steps; fast workers make more.

        The loader is begun again when it is exhausted.
        """
        tickets = self._tickets(total_steps)
        while True:
            empty = True
            for batch in loader:
                empty = False
                # A store that took another's place counts from what its first comer knew, one out of reach not at all.
                self._taken = max(self._taken + 1, next(tickets))
                if self._taken > total_steps:
                    return
                yield batch
            if empty:
                raise InputError("the loader gives no batches (any more): give one that can be begun again")

    def _tickets(self, total: int) -> Iterator[int]:
        """How many mini-batches all workers have taken, one more each time.

        The next are asked for while the last are worked on: as many as last for the longest time that one of the
        newest answers took. On a link that is full of messages that is several steps. But never more than half of
        this worker's share of what is left: nobody is to have many at the end, when the others have none.
        """

        def ask(count: int) -> tuple[int, float]:
            began = time.monotonic()
            return self.store.add("batches", count) or 0, time.monotonic() - began

        with ThreadPoolExecutor(1, thread_name_prefix="gossamer-tickets") as clerk:
            took: deque[float] = deque(maxlen=16)
            count = 1
            asked = clerk.submit(ask, count)
            while True:
                (last, took_s), given = asked.result(), count
                took.append(took_s)
                step_s = self.worker.step_s
                meanwhile = int(2 * max(took) / step_s) if step_s else 0
                share = (total - last) // (2 * len(self.groups.everybody))
                count = 1 + max(0, min(TICKETS, meanwhile, share))
                asked = clerk.submit(ask, count)
                for left in reversed(range(given)):
                    yield last - left

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean model of all workers in place of this worker's own, buffers included; all workers have to ask."""
        with self.state.lock:
            before, buffers = self.flat_model.weights.clone(), self.flat_model.buffer_vector()
            x = self.flat_model.x.clone()
        # What is under way must not see the averaged weights.
        self.driver.drain()
        mean, mean_buffers = self._host_means(x, buffers)
        with self.state.lock:
            self.flat_model.load_weights(mean)
            self.flat_model.load_buffers(mean_buffers)
        try:
            yield
        finally:
            with self.state.lock:
                self.flat_model.load_weights(before)
                self.flat_model.load_buffers(buffers)

    def _host_means(self, *vectors: Tensor) -> list[Tensor]:
        """Where a worker is lost in the middle of it these are our own: the others may have theirs and have gone on."""
        try:
            self.groups.averaged.begin()
            return [
                self.groups.mean(self.groups.averaged, FOREGROUND, vector.to("cpu"))[0] if len(vector) else vector
                for vector in vectors
            ]
        except StepRetry:
            self.events.append("a worker was lost while the mean was taken: looking at our own instead")
            return [vector.to("cpu", copy=True) for vector in vectors]

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a tensor of any shape over all workers, of a score for instance; all workers have to ask."""
        (mean,) = self._host_means(tensor.detach().flatten().double())
        return mean.to(tensor.dtype).reshape(tensor.shape).to(tensor.device)

    def finish(self) -> None:
        """Agree with the others on the end; afterwards all workers hold the same, averaged model."""
        if self._finished:
            return
        self.driver.abandon_step()
        self._done = self.exchanges.done = True
        self._await_others()
        self.driver.drain()
        self.driver.stop_background(self.exchanges.longest_s + 1)
        while not self._end_together():
            pass
        self.flat_model.load_weights(self.flat_model.x)
        self.close()

    def _end_together(self) -> bool:
        """The method's last words and the last mean; False if somebody was lost, or came, in the middle of it."""
        of = self.groups.finish
        try:
            of.begin()
            # The first thing that is sent: where the connections fail nobody has begun yet, and it can be begun again.
            spoken = self.groups.gather(of, FOREGROUND, (torch.tensor([int(self._spoken)]),))
            if not any(int(each) for (each,) in spoken):
                self._spoken = True
                self.driver.finish(of)
            self._last_mean()
            self._standing = HAS_THE_MEAN
            self._await_means()
        except StepRetry:
            return False
        except TrainingEnded:
            pass
        return True

    def _last_mean(self) -> None:
        """The mean over all workers whose weights are finite and of this run, buffers included."""
        of = self.groups.finish
        x, buffers = self.flat_model.x.to("cpu"), self.flat_model.buffer_vector().to("cpu")
        if self._standing != HAS_THE_MEAN:
            self._standing = int(is_finite(x) and is_finite(buffers) and not self.state.needs_state)
        mine = torch.tensor([self._standing, torch.linalg.vector_norm(x)], dtype=torch.float64)
        everybody = torch.stack([each for (each,) in self.groups.gather(of, FOREGROUND, (mine,))])
        # Who has the mean already gives it to the others; where nobody's weights count they all do.
        best = everybody[:, 0] == everybody[:, 0].max()
        usual = float(everybody[best, 1].median())
        best &= torch.tensor([not absurd(float(length), usual) for length in everybody[:, 1]])
        if not best.any():
            best[:] = True
        share = int(best.sum()) / len(best)
        counts = bool(best[of.present.index(self.rank_info.rank)])
        means = []
        for vector in (x, buffers):
            mine = vector if counts else torch.zeros_like(vector)
            means.append(self.groups.mean(of, FOREGROUND, mine)[0].div_(share) if len(vector) else vector)
        self.flat_model.x.copy_(means[0])
        self.flat_model.load_buffers(means[1])

    def _await_means(self) -> None:
        """Nobody leaves before all have the mean, and the store's host leaves last."""
        of = self.groups.finish
        others = [rank for rank in of.present if rank != self.rank_info.rank]

        def all_have(said: str) -> bool:
            return all(self.store.get(f"{said}/{rank}") is not None or self.heartbeats.dead(rank) for rank in others)

        has, left = (f"{of.key}/{of.generation}/{what}" for what in ("has", "left"))
        while True:
            self.store.set(f"{has}/{self.rank_info.rank}", "1")
            if of.wanted > of.generation:
                raise StepRetry
            if all_have(has):
                break
            time.sleep(END_POLL_S)
        if self.store.hosted_here:
            until = time.monotonic() + GRACE_S
            while time.monotonic() < until and not all_have(left):
                time.sleep(END_POLL_S)
        else:
            self.store.set(f"{left}/{self.rank_info.rank}", "1")

    def _all_done(self) -> bool:
        """Whether every other worker alive is done with its training."""
        return all(
            self.groups.done(rank) or self.heartbeats.dead(rank)
            for rank in self.groups.everybody
            if rank != self.rank_info.rank
        )

    def _await_others(self) -> None:
        """Wait until every worker alive is done, serving those that are not."""
        since = time.monotonic()
        left = False
        self._say_done()
        while True:
            if self._all_done():
                return
            if not left and time.monotonic() - since > GRACE_S:
                self.groups.leave()
                left = True
            time.sleep(0.02)

    def close(self) -> None:
        """Let go of everything at once, without a last average."""
        atexit.unregister(self.close)
        self._finished = True
        self.driver.close()
        self.exchanges.close()
        self._tender.join(2 * POLL_S + 1)
        self.groups.close()
        self.driver.join(CLOSE_S)
        self.store.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()
