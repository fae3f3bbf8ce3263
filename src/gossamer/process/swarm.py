"""What ``gossamer.join`` gives back: this worker's part in training one model on many."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gossamer.effects import Effect, Gather, Mean, Pair, Start, Steps, Swap, Ticket, Update, Wait
from gossamer.errors import InputError
from gossamer.flat import Flat
from gossamer.methods import Method
from gossamer.process.beats import Beats
from gossamer.process.binding import Binding
from gossamer.process.deadline import Deadline
from gossamer.process.edge import Lost
from gossamer.process.groups import FINISH, FOREGROUND, START, Aborted, Group, Groups, Stopped, Void
from gossamer.process.neighbourhood import Neighbourhood
from gossamer.process.pairing import Agreement, Pairing
from gossamer.process.place import Place, own_host
from gossamer.process.step_call import overflowed, prepare
from gossamer.process.worker import ProcessWorker
from gossamer.seeds import stream
from gossamer.topology import Topology

TEND_S = 0.1
"""How often a worker looks after its connections, beside its training."""

GRACE_S = 0.5
"""How long a worker that is done waits for the others before it leaves their groups."""

FRESH_S = 30.0
"""How long a worker that comes back waits for a peer's weights."""

ABSURD = 1e3
"""A vector so many times longer than our own is refused."""

Batch = TypeVar("Batch")


@dataclass
class Metrics:
    """How this worker fares."""

    steps: int = 0
    exchanges: int = 0
    bytes_sent: int = 0
    idle_s: float = 0.0
    consensus: float = 0.0
    """Estimate of sqrt(mean_i ‖x_i − x̄‖²) from the newest exchange: of two workers at distance d."""
    peers_alive: int = 0
    lost: int = 0
    """Connections that broke."""
    refused: int = 0
    """Messages that were not finite or absurdly large."""


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
    ) -> None:
        self.method, self.topology, self.place = method, topology, place
        self.has_background = type(method).background is not Method.background
        two_vectors = self.has_background or type(method).point is not Method.point
        self.binding = Binding(model, optimizer, two_vectors)
        self.buffers = Flat.of_buffers(model)
        self.worker = ProcessWorker(place.rank, topology, seed, self.binding)
        self.news: list[str] = []
        self._counts = Metrics()
        self._lock = threading.RLock()
        self._steps_changed = threading.Condition()
        self._stopped = self._done = self._finished = False
        self._step: Generator[Effect, Any, None] | None = None
        self._in_step = self._void = self._tainted = False
        self._couriers: ThreadPoolExecutor | None = None
        self._under_way: dict[Ticket, Future[Any]] = {}
        self._agreement: Agreement | None = None
        self._swap_deadline = Deadline(first_s=60.0, least_s=2.0)
        self._received: Tensor | None = None
        self._next_offer = 0.0
        self._taken = 0
        self._everybody = tuple(range(topology.workers))

        self.point = place.meeting_point()
        self.beats = Beats(place.rank, self.point)
        self.groups = Groups(place.rank, self.point, self.beats, self, lambda: self._stopped)
        self.neighbourhood = Neighbourhood(place.rank, self._needed_neighbours(), self.point, self._hear)
        self.pairing = Pairing(self.neighbourhood, stream(seed, "pairing", place.rank), lambda: self._stopped)
        self._tender = threading.Thread(target=self._tend, name="gossamer-tend", daemon=True)
        self._tender.start()
        self._meet()
        if two_vectors:
            self.method.point(self.worker, self.binding.weights)
        self._hooks = [
            optimizer.register_step_pre_hook(prepare),
            optimizer.register_step_pre_hook(lambda *_: self._before_step()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        self._thread: threading.Thread | None = None
        if self.has_background:
            self._thread = threading.Thread(target=self._background, name="gossamer-background", daemon=True)
            self._thread.start()
            if self.pairing.fresh:
                self._await_weights()

    # Meeting the others

    def _needed_neighbours(self) -> tuple[int, ...]:
        """Edges are for methods that exchange in pairs; the others meet in groups."""
        return self.topology.neighbours(self.place.rank) if self.method.pairwise else ()

    def _meet(self) -> None:
        """Everybody starts from rank 0's weights and buffers; a worker that comes back takes those of the others."""
        address = self.point.host_own(own_host(self.place.host))
        self.point.set(f"address/{self.place.rank}", f"{address[0]} {address[1]}")
        self.point.moved.append(self._say_started)
        self.beats.beat()
        start = self.groups.group(self._everybody, START)
        # Nobody says that the run has started before everybody was there: who hears it and was not comes back.
        start.given_up = lambda: self.point.get("started") is not None
        self.position_new = self.place.rank != 0
        try:
            with contextlib.suppress(Void):
                start.regroup(FOREGROUND)
            self._say_started()
        except Stopped:
            self._come_back()
        self.position_new = False
        self.beats.all_born = True
        for rank in self._everybody:
            found = self.point.get(f"address/{rank}")
            if found is not None:
                host, port = found.decode().split()
                self.point.addresses.append((host, int(port)))

    def _come_back(self) -> None:
        """The run goes on already: take over the others' weights."""
        self.position_new = True
        if not self.method.pairwise:
            self._finished = True
            raise InputError(
                f"the run goes on without worker {self.place.rank}, and {self.method.name} takes nobody back: "
                "gossip and a2cid2 do; or restart all workers"
            )
        self.news.append("came back: taking over a peer's weights")
        self.pairing.fresh = True

    def _say_started(self) -> None:
        """Tell a worker that comes to the meeting point that the run goes on already."""
        self.point.set("started", "1")

    def _await_weights(self) -> None:
        until = time.monotonic() + FRESH_S
        while self.pairing.fresh and time.monotonic() < until:
            time.sleep(0.01)
        if self.pairing.fresh:
            self.pairing.fresh = False
            self.news.append("no peer gave its weights: going on with our own")

    # The state that a worker which is behind takes over (groups.State)

    def position(self, lane: str) -> int:
        if self.position_new:
            return -1
        # Beside the training nobody is behind: there is no step that could be void.
        return self.worker.step if lane == FOREGROUND else 0

    def tensors(self) -> list[Tensor]:
        shared = [name for name in self.method.shared if name in self.method.shared_vectors]
        vectors = [
            self.binding.x,
            self._buffer_vector(),
            *(self.worker.vector(name) for name in shared),
            *self._state(),
        ]
        scalars = [self.worker.scalars.get(name, float("nan")) for name in self.method.shared]
        return [
            *(vector.detach().to("cpu", copy=True) for vector in vectors),
            torch.tensor([self.worker.step, *scalars], dtype=torch.float64),
        ]

    def take(self, tensors: list[Tensor]) -> None:
        shared = [name for name in self.method.shared if name in self.method.shared_vectors]
        with self._lock:
            self.binding.x.copy_(tensors[0])
            if self.binding.two_vectors:
                self.binding.weights.copy_(tensors[0])
            self._load_buffers(tensors[1])
            own = [*(self.worker.vector(name) for name in shared), *self._state()]
            for mine, tensor in zip(own, tensors[2:-1], strict=True):
                mine.copy_(tensor)
            for name, value in zip(self.method.shared, tensors[-1][1:].tolist(), strict=True):
                if value == value:
                    self.worker.scalars[name] = value
            if self.method.lockstep:
                self.worker.step = int(tensors[-1][0])
            self.position_new = False

    def _state(self) -> list[Tensor]:
        """The optimizer's tensors, where workers that make the same updates need the same."""
        if not self.method.same_updates:
            return []
        state = self.binding.optimizer.state
        entries = (state[parameter] for parameter in self.binding.parameters if parameter in state)
        return [entry[name] for entry in entries for name in sorted(entry) if isinstance(entry[name], Tensor)]

    def regrouped(self) -> None:
        self.news.append("the group was rebuilt")
        self._under_way.clear()
        self.method.regrouped(self.worker)

    def _buffer_vector(self) -> Tensor:
        out = torch.empty(self.buffers.size, dtype=self.buffers.dtype, device=self.binding.device)
        return self.buffers.pack(dict(self.binding.model.named_buffers()), out)

    def _load_buffers(self, vector: Tensor) -> None:
        self.buffers.unpack(vector.to(self.binding.device), dict(self.binding.model.named_buffers()))

    # The training thread

    def _before_step(self) -> None:
        if self._finished or overflowed(self.binding.optimizer):
            return
        if self._in_step:
            # The optimizer failed in the middle of the last step, and the user has caught that: that step is void.
            self._step, self._void = None, True
            self._after_step()
        self._in_step, self._void = True, False
        self._lock.acquire()
        self.binding.enter_step()
        if self._tainted:
            # This gradient was taken at weights that were not finite; others are in their place by now.
            self._tainted, self._void = False, True
            self.binding.no_update()
            return
        self._step = self.method.step(self.worker)
        if self._foreground(None):
            self.binding.hand_over_gradient()
        else:
            self.binding.no_update()

    def _after_step(self) -> None:
        if not self._in_step or self._finished:
            return
        if self._step is not None:
            self._foreground(None)
        if self.binding.two_vectors:
            self.method.point(self.worker, self.binding.weights)
        self.binding.leave_step()
        if not self._void:
            self.worker.stepped()
            self._counts.steps += 1
        self._lock.release()
        self._in_step = False
        with self._steps_changed:
            self._steps_changed.notify_all()

    def _foreground(self, answer: Any) -> bool:
        """Drive the method's step; True if it asks for the optimizer's update, False if it is over."""
        assert self._step is not None
        while True:
            try:
                effect = self._step.send(answer)
            except StopIteration:
                self._step = None
                return False
            if isinstance(effect, Update):
                return True
            began = time.monotonic()
            # What is waited for may need the lock on its way.
            self._lock.release()
            try:
                answer = self._answer(effect, FOREGROUND)
            except (Void, Stopped):
                self._step.close()
                self._step = None
                self._void = True
                return False
            finally:
                self._lock.acquire()
                self._counts.idle_s += time.monotonic() - began

    # The background thread

    def _background(self) -> None:
        asking = self.method.background(self.worker)
        answer: Any = None
        # It ends only where it waits for a next exchange or step: what was agreed on with a peer is done.
        try:
            while True:
                with self._lock:
                    effect = asking.send(answer)
                answer = self._answer(effect, "background")
        except (Stopped, StopIteration):
            pass
        finally:
            asking.close()

    def _answer(self, effect: Effect, lane: str) -> Any:
        """Do what a method asks for, except for updates."""
        if isinstance(effect, Steps):
            return self._await_steps(self.worker.step + effect.count)
        if isinstance(effect, Mean):
            return self._mean(effect, lane)
        if isinstance(effect, Gather):
            return self._gather(effect, lane)
        if isinstance(effect, Pair):
            return self._pair(effect)
        if isinstance(effect, Swap):
            return self._swap(effect)
        if isinstance(effect, Start):
            if self._couriers is None:
                self._couriers = ThreadPoolExecutor(1, thread_name_prefix="gossamer-courier")
            ticket = Ticket(effect.effect)
            self._under_way[ticket] = self._couriers.submit(self._answer, effect.effect, "courier")
            return ticket
        assert isinstance(effect, Wait)
        try:
            return self._under_way.pop(effect.ticket).result()
        except Aborted:
            self.groups.group(self._everybody).regroup(FOREGROUND)
            raise Void from None

    def _await_steps(self, target: int) -> None:
        with self._steps_changed:
            while self.worker.step < target and not self._stopped:
                self._steps_changed.wait(TEND_S)
        if self._stopped:
            raise Stopped

    def _mean(self, effect: Mean, lane: str) -> Tensor:
        group = self.groups.group(self._everybody if effect.group is None else effect.group)
        mean = self.groups.mean(group, lane, self._to_host(effect.vector))
        self._account(len(group.present), 2 * (len(group.present) - 1) / len(group.present), effect.vector)
        return self._to_device(mean)

    def _gather(self, effect: Gather, lane: str) -> list[tuple[Tensor, ...]]:
        group = self.groups.group(self._everybody)
        gathered = self.groups.gather(group, lane, tuple(self._to_host(tensor) for tensor in effect.tensors))
        for tensor in effect.tensors:
            self._account(len(group.present), len(group.present) - 1, tensor)
        return [tuple(self._to_device(tensor) for tensor in tensors) for tensors in gathered]

    def _account(self, members: int, share: float, vector: Tensor) -> None:
        if members > 1:
            self._counts.exchanges += 1
            self._counts.bytes_sent += round(share * vector.numel() * vector.element_size())

    # Exchanges in pairs

    def _hear(self, peer: int, words: tuple[int, ...]) -> None:
        self.pairing.hear(peer, words)

    def _pair(self, effect: Pair) -> int:
        agreement = self.pairing.agree(self._until_offer)
        if agreement is None:
            raise Stopped
        if agreement.offered:
            # Half of a worker's exchanges are its own offers; it does not catch up on more than one.
            gap = float(self.worker.rng.standard_exponential()) * 2 / effect.rate
            self._next_offer = max(self._next_offer + gap, self.worker.time - 2 / effect.rate)
        self._agreement = agreement
        return agreement.peer

    def _until_offer(self) -> float:
        """Seconds until this worker's next offer is due."""
        if self.pairing.fresh:
            return 0.0
        if self._done:
            return float("inf")
        return (self._next_offer - self.worker.time) * (self.worker.step_s or 0.1)

    def _swap(self, swap: Swap) -> Tensor | None:
        agreement, edge = self._agreement, self.neighbourhood.edge(swap.peer)
        if edge is None or agreement is None:
            return None
        sent = self._to_host(swap.vector)
        if self._received is None:
            self._received = torch.empty_like(sent)
        began = time.monotonic()
        try:
            edge.swap(sent, self._received, self._swap_deadline.seconds)
        except Lost:
            return None
        self._swap_deadline.observe(time.monotonic() - began)
        self._counts.bytes_sent += sent.numel() * sent.element_size()
        if agreement.taken_from:
            return None
        ours, theirs = (float(torch.linalg.vector_norm(vector)) for vector in (sent, self._received))
        sick = not ours < float("inf")
        if not theirs <= ABSURD * (ours + 1.0) and not (sick and theirs < float("inf")):
            self._counts.refused += 1
            self.news.append(f"refused a message of worker {swap.peer}: not finite or absurdly large")
            return None
        received = self._to_device(self._received)
        if self.pairing.fresh or sick:
            self._adopt(received, swap.peer, sick)
            return None
        self._counts.exchanges += 1
        self._counts.consensus = float(torch.linalg.vector_norm(sent - self._received)) / 2**0.5
        return received

    def _adopt(self, weights: Tensor, peer: int, sick: bool) -> None:
        """Take over a peer's weights."""
        with self._lock:
            self.binding.x.copy_(weights)
            for vector in self.worker.vectors.values():
                vector.zero_()
            if not self._in_step:
                self.binding.weights.copy_(weights)
            self._tainted = sick
        why = "our weights were not finite" if sick else "joined"
        self.news.append(f"{why}: took over the weights of worker {peer}")
        self.pairing.fresh = self.position_new = False

    def _to_host(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "cpu" else tensor.to("cpu")

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor if self.binding.device.type == "cpu" else tensor.to(self.binding.device)

    # Beside the training

    def _tend(self) -> None:
        while not self._finished:
            # Whatever the network does to one look, there is a next one.
            with contextlib.suppress(RuntimeError):
                self.point.go_home()
                self.beats.beat()
                self.neighbourhood.tend()
                if not self._done:
                    self.groups.tend()
            time.sleep(TEND_S)

    # What the user calls

    def metrics(self) -> Metrics:
        """How this worker fares."""
        self._counts.lost = self.neighbourhood.lost
        alive = sum(not self.beats.dead(rank) for rank in self._everybody if rank != self.place.rank)
        self._counts.peers_alive = alive
        return self._counts

    def batches(self, loader: Iterable[Batch], total_steps: int) -> Iterator[Batch]:
        """Mini-batches until all workers together have made ``total_steps`` steps; fast workers make more.

        The loader is begun again when it is exhausted.
        """
        while True:
            empty = True
            for batch in loader:
                empty = False
                taken = self.point.add("batches", 1)
                # A store that took another's place counts from 0 again, and one out of reach not at all.
                self._taken = max(self._taken + 1, taken or 0)
                if self._taken > total_steps:
                    return
                yield batch
            if empty:
                raise InputError("the loader gives no batches (any more): give one that can be begun again")

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean model of all workers in place of this worker's own, buffers included; all workers have to ask."""
        with self._lock:
            before, buffers = self.binding.weights.clone(), self._buffer_vector()
            x = self.binding.x.clone()
        # What is under way must not see the averaged weights.
        for sent in list(self._under_way.values()):
            sent.exception()
        group = self.groups.group(self._everybody, "averaged")
        mean = self.groups.mean(group, "mean", self._to_host(x))
        mean_buffers = self.groups.mean(group, "mean", self._to_host(buffers))
        with self._lock:
            self.binding.weights.copy_(mean)
            self._load_buffers(mean_buffers)
        try:
            yield
        finally:
            with self._lock:
                self.binding.weights.copy_(before)
                self._load_buffers(buffers)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of a tensor of any shape over all workers, of a score for instance; all workers have to ask."""
        group = self.groups.group(self._everybody, "averaged")
        mean = self.groups.mean(group, "mean", self._to_host(tensor.detach().flatten().double()))
        return mean.to(tensor.dtype).reshape(tensor.shape).to(tensor.device)

    def finish(self) -> None:
        """Agree with the others on the end; afterwards all workers hold the same, averaged model."""
        if self._finished:
            return
        self._done = True
        self._await_others()
        self._stopped = True
        with self._steps_changed:
            self._steps_changed.notify_all()
        # Whoever still waits for an average of all is let go: the others have left it.
        self.groups.close()
        if self._thread is not None:
            self._thread.join(self._swap_deadline.seconds + 1)
        self._stopped = False
        last = self.groups.group(self._everybody, FINISH)
        with contextlib.suppress(Void, Stopped):
            self._drive_finish(last)
            self._last_mean(last)
            if self.buffers.size:
                self._load_buffers(self.groups.mean(last, "last", self._to_host(self._buffer_vector())))
        self.binding.weights.copy_(self.binding.x)
        self.close()

    def _last_mean(self, last: Group) -> None:
        """The mean over all workers whose weights are finite."""
        x = self._to_host(self.binding.x)
        counts = bool(torch.isfinite(x).all())
        summed = torch.cat([x if counts else torch.zeros_like(x), torch.full((1,), float(counts), dtype=x.dtype)])
        mean = self.groups.mean(last, "last", summed)
        if mean[-1] > 0:
            self.binding.x.copy_(mean[:-1].div_(mean[-1].clone()))

    def _await_others(self) -> None:
        """Wait until every worker alive is done, serving those that are not."""
        self.point.set(f"done/{self.place.rank}", "1")
        since = time.monotonic()
        left = False
        while True:
            waiting = [
                rank
                for rank in self._everybody
                if rank != self.place.rank and self.point.get(f"done/{rank}") is None and not self.beats.dead(rank)
            ]
            if not waiting:
                return
            if not left and time.monotonic() - since > GRACE_S:
                self.groups.close()
                left = True
            self.point.set(f"done/{self.place.rank}", "1")
            time.sleep(0.02)

    def _drive_finish(self, group: Group) -> None:
        asking = self.method.finish(self.worker)
        answer: Any = None
        with contextlib.suppress(StopIteration):
            while True:
                effect = asking.send(answer)
                if isinstance(effect, Mean):
                    answer = self._to_device(self.groups.mean(group, "finish", self._to_host(effect.vector)))
                else:
                    answer = self._answer(effect, "finish")

    def close(self) -> None:
        """Let go of everything at once, without a last average."""
        self._stopped = self._finished = True
        for hook in self._hooks:
            hook.remove()
        self.neighbourhood.close()
        if self._couriers is not None:
            self._couriers.shutdown(wait=False, cancel_futures=True)
        self._tender.join(2 * TEND_S + 1)
        self.groups.close()
        self.point.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()
