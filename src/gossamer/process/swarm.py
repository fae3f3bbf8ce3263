"""What ``gossamer.join`` gives back: this worker's part in training one model on many."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.errors import InputError
from gossamer.methods import Method
from gossamer.process import nccl
from gossamer.process.beats import Beats
from gossamer.process.binding import Binding
from gossamer.process.diary import Diary
from gossamer.process.driver import Driver
from gossamer.process.exchanges import Exchanges
from gossamer.process.groups import BACKGROUND, FOREGROUND, Groups, Stopped, Void
from gossamer.process.metrics import Metrics
from gossamer.process.place import Place, own_host
from gossamer.process.staging import Staging
from gossamer.process.state import WorkerState
from gossamer.process.worker import ProcessWorker
from gossamer.recording import Recorder
from gossamer.topology import Topology

TEND_S = 0.1
"""How often a worker looks after its connections, beside its training."""

GRACE_S = 0.5
"""How long a worker that is done waits for the others before it leaves their groups."""

FRESH_S = 30.0
"""How long a worker that comes back waits for a peer's weights."""

TICKETS = 4
"""So many mini-batches are taken at once at most, where workers share them out."""

Batch = TypeVar("Batch")


class Swarm:
    """This worker's part in the training. Made by ``gossamer.join``; a context manager that ends with ``finish``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: Method,
        topology: Topology,
        place: Place,
        seed: int,
        transport: str = "gloo",
        recorder: Recorder | None = None,
    ) -> None:
        self.method, self.topology, self.place = method, topology, place
        has_background = type(method).background is not Method.background
        self.binding = Binding(model, optimizer, has_background or type(method).point is not Method.point)
        self.worker = ProcessWorker(place.rank, topology, seed, self.binding)
        self.diary = self.worker.diary = Diary(place.rank, recorder)
        self.state = WorkerState(method, self.binding, self.worker)
        if transport == "nccl":
            nccl.check(self.binding.device)
        self.staging = Staging(self.binding.device, nccl=transport == "nccl")
        self._counts = Metrics()
        self._done = self._finished = False
        self._taken = 0
        self.point = place.meeting_point()
        self.beats = Beats(place.rank, self.point)
        # Whoever averages beside the training also rebuilds its groups; it never holds up a step.
        owner = BACKGROUND if has_background and not method.lockstep else FOREGROUND
        self.groups = Groups(
            place.rank, topology.workers, self.point, self.beats, self.state, owner, lambda: self.driver.stopped
        )
        neighbours = topology.neighbours(place.rank) if method.pairwise else ()
        self.exchanges = Exchanges(
            self.state, neighbours, self.point, self.staging, self._counts, lambda: self.driver.stopped, self.diary
        )
        self.driver = Driver(self.state, self.groups, self.exchanges, self.staging, self._counts, self.diary)
        self._tender = threading.Thread(target=self._tend, name="gossamer-tend", daemon=True)
        self._tender.start()
        try:
            self._meet(owner)
        except BaseException:
            self.close()
            raise
        if self.binding.two_vectors:
            method.point(self.worker, self.binding.weights)
            self.binding.load_weights(self.binding.weights)

    @property
    def news(self) -> list[str]:
        """What happened so far, one line each: peers lost, groups rebuilt, weights taken over."""
        return self.state.news

    # Meeting the others

    def _meet(self, owner: str) -> None:
        """Everybody starts from rank 0's weights and buffers; a worker that comes back takes those of the others."""
        address = self.point.host_own(own_host(self.place.host))
        self.point.set(f"address/{self.place.rank}", f"{address[0]} {address[1]}")
        self.point.moved.append(self._say_started)
        self.beats.beat()
        # Nobody says that the run has started before everybody was there: who hears it and was not comes back.
        self.groups.train.given_up = lambda: self.point.get("started") is not None
        self.state.new = self.place.rank != 0
        try:
            with contextlib.suppress(Void):
                self.groups.train.regroup(owner)
            self._say_started()
            self.state.new = False
        except Stopped:
            self._come_back(owner)
        self.groups.train.given_up = lambda: False
        self.diary.agree(self.point)
        self.beats.all_born = True
        for rank in self.groups.everybody:
            found = self.point.get(f"address/{rank}")
            if found is not None:
                host, port = found.decode().split()
                self.point.addresses.append((host, int(port)))

    def _come_back(self, owner: str) -> None:
        """The run goes on already: take over the others' state."""
        self.state.new = True
        self.groups.train.given_up = lambda: False
        self.news.append("came back: taking over from the others")
        if self.method.pairwise:
            self.exchanges.pairing.fresh = True
            self.driver.start_background()
            self._await_weights()
        else:
            self.groups.train.come_back()
            with contextlib.suppress(Void):
                self.groups.train.regroup(owner)
        if self.state.new:
            self.news.append("nobody is left to take over from: this worker's weights do not count in the end")

    def _say_started(self) -> None:
        """Tell a worker that comes to the meeting point that the run goes on already."""
        self.point.set("started", "1")

    def _await_weights(self) -> None:
        until = time.monotonic() + FRESH_S
        while self.exchanges.pairing.fresh and time.monotonic() < until and not self._all_done():
            time.sleep(0.01)
        self.exchanges.pairing.fresh = False

    # Beside the training

    def _tend(self) -> None:
        while not self._finished:
            # Whatever the network does to one look, there is a next one.
            with contextlib.suppress(RuntimeError):
                self.point.go_home()
                self.beats.beat()
                self.exchanges.tend()
                if not self._done:
                    self.groups.tend()
            time.sleep(TEND_S)

    # What the user calls

    def metrics(self) -> Metrics:
        """How this worker fares."""
        self._counts.lost = self.exchanges.neighbourhood.lost
        others = (rank for rank in self.groups.everybody if rank != self.place.rank)
        self._counts.peers_alive = sum(not self.beats.dead(rank) for rank in others)
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
        self.point.claim("batches", str(self._taken))

    def batches(self, loader: Iterable[Batch], total_steps: int) -> Iterator[Batch]:
        """Mini-batches until all workers together have made ``total_steps`` steps; fast workers make more.

        The loader is begun again when it is exhausted.
        """
        tickets = self._tickets()
        while True:
            empty = True
            for batch in loader:
                empty = False
                # A store that took another's place counts from 0 again, and one out of reach not at all.
                self._taken = max(self._taken + 1, next(tickets))
                if self._taken > total_steps:
                    return
                yield batch
            if empty:
                raise InputError("the loader gives no batches (any more): give one that can be begun again")

    def _tickets(self) -> Iterator[int]:
        """How many mini-batches all workers have taken, one more each time.

        The next is asked for while the last is worked on, and more at a time where that is not soon enough: on a link
        that is full of messages answers take long.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="gossamer-tickets") as clerk:
            count = 1
            asked = clerk.submit(self.point.add, "batches", count)
            asked.result()
            while True:
                late = not asked.done()
                last, given = asked.result() or 0, count
                count = min(TICKETS, count + 1) if late else max(1, count - 1)
                asked = clerk.submit(self.point.add, "batches", count)
                for left in reversed(range(given)):
                    yield last - left

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean model of all workers in place of this worker's own, buffers included; all workers have to ask."""
        with self.state.lock:
            before, buffers = self.binding.weights.clone(), self.binding.buffer_vector()
            x = self.binding.x.clone()
        # What is under way must not see the averaged weights.
        self.driver.drain()
        mean = self._host_mean(x)
        mean_buffers = self._host_mean(buffers)
        with self.state.lock:
            self.binding.load_weights(mean)
            self.binding.load_buffers(mean_buffers)
        try:
            yield
        finally:
            with self.state.lock:
                self.binding.load_weights(before)
                self.binding.load_buffers(buffers)

    def _host_mean(self, vector: Tensor) -> Tensor:
        return self.groups.mean(self.groups.averaged, FOREGROUND, vector.to("cpu"))[0]

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a tensor of any shape over all workers, of a score for instance; all workers have to ask."""
        mean = self._host_mean(tensor.detach().flatten().double())
        return mean.to(tensor.dtype).reshape(tensor.shape).to(tensor.device)

    def finish(self) -> None:
        """Agree with the others on the end; afterwards all workers hold the same, averaged model."""
        if self._finished:
            return
        self._done = self.exchanges.done = True
        self._await_others()
        self.driver.drain()
        self.driver.stop_background(self.exchanges.longest_s + 1)
        self.driver.stopped = False
        self.driver.finish(self.groups.finish)
        with contextlib.suppress(Void, Stopped):
            self._last_mean()
        self.binding.load_weights(self.binding.x)
        self.close()

    def _last_mean(self) -> None:
        """The mean over all workers whose weights are finite and of this run, buffers included."""
        x, buffers = self.binding.x.to("cpu"), self.binding.buffer_vector().to("cpu")
        counts = bool(torch.isfinite(x).all()) and not self.state.new
        votes, _ = self.groups.mean(self.groups.finish, FOREGROUND, torch.tensor([float(counts)], dtype=torch.float64))
        for vector, load in ((x, self.binding.x.copy_), (buffers, self.binding.load_buffers)):
            if len(vector):
                # Where nobody's weights count they all do: it is the best there is.
                mine = vector if counts or not votes else torch.zeros_like(vector)
                mean, _ = self.groups.mean(self.groups.finish, FOREGROUND, mine)
                load(mean.div_(float(votes) or 1.0))

    def _all_done(self) -> bool:
        """Whether every other worker alive is done with its training."""
        return all(
            self.point.get(f"done/{rank}") is not None or self.beats.dead(rank)
            for rank in self.groups.everybody
            if rank != self.place.rank
        )

    def _await_others(self) -> None:
        """Wait until every worker alive is done, serving those that are not."""
        since = time.monotonic()
        left = False
        while True:
            # Again and again: the store may be another by now.
            self.point.set(f"done/{self.place.rank}", "1")
            if self._all_done():
                return
            if not left and time.monotonic() - since > GRACE_S:
                self.groups.leave()
                left = True
            time.sleep(0.02)

    def close(self) -> None:
        """Let go of everything at once, without a last average."""
        self._finished = True
        self.driver.close()
        self.exchanges.close()
        self._tender.join(2 * TEND_S + 1)
        self.groups.leave()
        self.point.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()
