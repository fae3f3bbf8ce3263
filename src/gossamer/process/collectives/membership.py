"""Who is there: membership in groups of workers, rebuilt among the survivors when a member leaves or comes back.

It has *generations*. In each, the workers agree at the meeting point on who is present; whatever group a
method averages over is then those of its members that are present, and process groups are built for that on first
use. When a communication fails, or a worker comes back, somebody asks for the next generation; everybody hears of it
beside its training and says that it is there; those who say so in time are the members of that generation. A member
that is behind the others then takes over their state, so that all go on from the same place.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gossamer.process.collectives import gloo, nccl
from gossamer.process.collectives.state_transfer import level
from gossamer.process.deadline import Deadline

if TYPE_CHECKING:
    from gossamer.process.collectives.groups import Groups

POLL_S = 0.02
BUILD_S = 5.0
"""How long it may take to build a process group whose members are all ready."""

LATE_S = 60.0
"""Whoever is alive is waited for at least so long; later the average is begun again when all are there."""

ALIGN_S = 60.0
"""How long it may take to send a state."""

LOOK_S = 0.3
"""How often a worker that waits for others to be ready looks whether they are still there."""

STUCK_S = 1.0
"""After so long in one communication a worker looks whether the others are still in it."""

TRAIN, AVERAGED, FINISH = "train", "averaged", "finish"
"""What groups are for: to begin the run and train; to look at the mean model; to end the run."""

FOREGROUND, BACKGROUND, ASYNC, STATE_TRANSFER = "foreground", "background", "courier", "align"
"""Threads that communicate: the training's, the method's background part, and the one for what was started; and what
any of them does first in a new group."""

Communications = list[dist.Work | gloo.PairExchange]


class StepRetry(Exception):
    """The group was rebuilt, or has to be: what was being done in it does not count, and is begun again."""


class CommAborted(Exception):
    """What was under way beside the training was lost with its group."""


class TrainingEnded(Exception):
    """Training has ended."""


class Membership:
    """Who is there for one purpose, over its generations, and the process groups among them."""

    def __init__(self, groups: Groups, purpose: str, owner: str, over: Callable[[], bool]) -> None:
        self.groups, self.owner, self.over = groups, owner, over
        self.until_done = purpose != FINISH
        """A worker that is done with its training is not waited for."""
        self.aligned = purpose == TRAIN
        """Members have to be at the same place before they go on. The others begin together, with ``begin``."""
        self.key = f"group/{purpose}"
        self.generation = -1
        self.wanted = 0
        self.present: list[int] = []
        self.deadline = Deadline(first_s=300.0, least_s=LATE_S)
        self.given_up: Callable[[], bool] = lambda: False
        """Whether there is no point in waiting for the others any more."""
        self.took_part: dict[str, tuple[tuple[int, ...], float]] = {}
        """Of each thread's newest communication: with whom it was, and when it began."""
        self._channels: dict[str, Any] = {}
        self._severed = threading.Event()
        """Whether their connections were closed."""
        self._began: dict[str, float] = {}
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Before a series of communications: agree on who takes part in all of them."""
        with self._lock:
            if self.wanted > self.generation:
                self.regroup(self.owner)

    def run(
        self,
        channel: str,
        communicate: Callable[[Any], Communications],
        among: tuple[int, ...] | None = None,
        begun: int | None = None,
        on_gpu: bool = False,
    ) -> list[int]:
        """Communicate with those of ``among`` (everybody) that are present; returns who took part.

        Raises StepRetry where that failed and there are survivors to begin again with; CommAborted where it failed and
        somebody else has to see to that, also where it began in another generation than ``begun``.
        ``on_gpu``: what travels lies on GPUs, one for each worker.
        """
        while True:
            with self._lock:
                if begun is not None and begun != self.generation:
                    raise CommAborted
                if self.wanted > self.generation:
                    if channel != self.owner:
                        # Its owner rebuilds it: where that is the training, all do it at the same step.
                        raise CommAborted
                    if not self.aligned:
                        raise StepRetry
                    self.regroup(channel)
                generation = self.generation
                present = [rank for rank in self.present if among is None or rank in among]
                severed = self._severed
            if len(present) == 1:
                return present
            self._began[channel] = began = time.monotonic()
            try:
                group = self._channel(channel, generation, present, on_gpu)
                self._wait(group, communicate(group), severed)
            except RuntimeError:
                with self._lock:
                    if self.generation == generation:
                        self.let_go()
                        self.want(generation + 1)
                if self.over():
                    raise TrainingEnded from None
                if channel != self.owner:
                    raise CommAborted from None
                continue
            finally:
                self._began.pop(channel, None)
            self.deadline.observe(time.monotonic() - began)
            self.took_part[channel] = tuple(present), began
            return present

    def _wait(self, group: Any, works: Communications, severed: threading.Event) -> None:
        for work in works:
            _finish(group, work, self.deadline.seconds, severed)

    def want(self, generation: int) -> None:
        """Ask everybody for this generation, or a later one that is asked for already."""
        self.wanted = max(self.wanted, generation)
        self._raise_wanted(lambda found: max(found, self.wanted))

    def come_back(self) -> None:
        """Ask for the generation after the present one, whichever that is."""
        self._raise_wanted(lambda found: found + 1)

    def _raise_wanted(self, to: Callable[[int], int]) -> None:
        """Change what is asked for at the meeting point; others may do so at the same time."""
        store, key = self.groups.store, f"{self.key}/wanted"
        while True:
            found = store.get(key)
            asked = to(int(found) if found is not None else -1)
            if found is not None and int(found) >= asked:
                return
            held = store.claim(key, str(asked), instead_of=found.decode() if found is not None else "")
            if held is None or held.decode() == str(asked):
                self.wanted = max(self.wanted, asked)
                return

    def republish(self) -> None:
        """At a store that may be a new one: say how far we are. Who is as far with others begins again with us."""
        if self.generation >= 0:
            mine = json.dumps(self.present)
            held = self.groups.store.claim(f"{self.key}/{self.generation}/members", mine)
            self.want(self.generation if held is None or held.decode() == mine else self.generation + 1)

    def poll(self) -> None:
        """Hear of a generation that somebody asked for, and say that we are there; beside the training."""
        found = self.groups.store.get(f"{self.key}/wanted")
        asked = int(found) if found is not None else 0
        if asked < self.wanted:
            # It was said at a store that is gone.
            self.want(self.wanted)
        self.wanted = max(self.wanted, asked)
        if self.aligned and self.wanted > self.generation:
            self.groups.store.set(f"{self.key}/{self.wanted}/here/{self.groups.rank}", "1")
        self._free_the_stuck()

    def _free_the_stuck(self) -> None:
        """End communications that wait for a member who is not there any more, or that others have given up."""
        began = min(list(self._began.values()), default=float("inf"))
        if time.monotonic() - began < STUCK_S:
            return
        # Only then: generator for all of them is a burden where they are many.
        if self.wanted > self.generation or any(map(self.groups.heartbeats.dead, self.present)):
            self.let_go()

    def regroup(self, channel: str) -> None:
        """Agree with the others on who is there, and start afresh among them."""
        while True:
            generation = self.wanted
            self.let_go()
            present = self._agree(generation)
            if self.wanted > generation:
                continue
            if self.groups.rank not in present:
                self.want(generation + 1)
                continue
            self.generation, self.present = generation, present
            try:
                if self.aligned and len(present) > 1:
                    group = self._channel(STATE_TRANSFER, generation, present)
                    self._began[STATE_TRANSFER] = time.monotonic()
                    self._align(group, channel)
                break
            except RuntimeError:
                if self.given_up():
                    self.let_go()
                    self.generation, self.present = -1, []
                    raise TrainingEnded from None
                self.want(generation + 1)
            finally:
                self._began.pop(STATE_TRANSFER, None)
        # What an exchange usually takes has changed with who is there.
        self.deadline = Deadline(first_s=self.deadline.seconds, least_s=LATE_S)
        if not self.aligned or generation == 0:
            return
        if len(present) == 1:
            # Alone there is nobody to be level with: the step goes on.
            self.groups.state.on_membership_change()
        else:
            raise StepRetry

    def _agree(self, generation: int) -> list[int]:
        store, rank = self.groups.store, self.groups.rank
        name = f"{self.key}/{generation}"
        while True:
            if self.over() or self.given_up():
                raise TrainingEnded
            store.set(f"{name}/here/{rank}", "1")
            found = store.get(f"{name}/members")
            if found is not None:
                return list(json.loads(found))
            here = [member for member in self.groups.everybody if store.get(f"{name}/here/{member}") is not None]
            gone = [member for member in self.groups.everybody if member not in here and self._gone(member)]
            if rank == min(here, default=-1) and len(here) + len(gone) == len(self.groups.everybody):
                claimed = store.claim(f"{name}/members", json.dumps(here))
                if claimed is not None:
                    return list(json.loads(claimed))
            newer = store.get(f"{self.key}/wanted")
            if newer is not None:
                self.wanted = max(self.wanted, int(newer))
            if self.wanted > generation:
                return []
            time.sleep(POLL_S)

    def _gone(self, member: int) -> bool:
        """Whether ``member``, who is another one, is dead or done with its training."""
        if member == self.groups.rank:
            return False
        return (self.until_done and self.groups.done(member)) or self.groups.heartbeats.dead(member)

    def _channel(self, channel: str, generation: int, present: list[int], on_gpu: bool = False) -> Any:
        """The process group of one thread of communication among ``present``; built when it is first used."""
        key = f"{generation}/{channel}/" + hashlib.sha1(",".join(map(str, present)).encode()).hexdigest()[:16]
        channels = self._channels
        if key not in channels:
            name = f"{self.key}/{key}"
            self._await_ready(name, generation, present)
            store = self.groups.store.store(BUILD_S, lambda: self._hopeless(generation, present))
            group_rank = present.index(self.groups.rank)
            if on_gpu:
                channels[key] = nccl.make_group(store, name, group_rank, len(present))
            else:
                beside = channel == BACKGROUND
                channels[key] = gloo.make_group(store, name, group_rank, len(present), BUILD_S, beside)
            if channels is not self._channels:
                _sever(channels[key])
        return channels[key]

    def _hopeless(self, generation: int, awaited: list[int]) -> bool:
        """Whether some of those who are waited for are not going to come."""
        if self.wanted > generation or self.over() or self.given_up():
            return True
        return any(map(self._gone, awaited))

    def _await_ready(self, name: str, generation: int, present: list[int]) -> None:
        """Wait until all are ready to build: gloo itself cannot be told that somebody is not going to come."""
        store, began, late = self.groups.store, time.monotonic(), present
        looked = began
        while late:
            store.set(f"{name}/ready/{self.groups.rank}", "1")
            late = [member for member in late if store.get(f"{name}/ready/{member}") is None]
            now = time.monotonic()
            if late and now - looked > LOOK_S:
                looked = now
                if self._hopeless(generation, late):
                    raise RuntimeError(f"workers {late} are not going to come")
            if late:
                time.sleep(POLL_S)

    def leave(self) -> None:
        """Close the connections that are not in use."""
        self._channels = {}

    def let_go(self) -> None:
        """Close all connections: whoever waits at their other ends, or here, notices."""
        channels, self._channels = self._channels, {}
        severed, self._severed = self._severed, threading.Event()
        severed.set()
        for group in channels.values():
            _sever(group)

    def _align(self, group: Any, channel: str) -> None:
        """Let members that are behind take over the state of one that is not."""
        state, severed = self.groups.state, self._severed

        def finish(work: dist.Work) -> None:
            _finish(group, work, ALIGN_S, severed)

        mine = torch.tensor([state.position(channel)])
        positions = [torch.zeros_like(mine) for _ in self.present]
        finish(group.allgather([positions], [mine]))
        steps = [int(position) for position in positions]
        ahead = max(steps)
        if self.generation > 0:
            state.on_membership_change()
        source = steps.index(ahead)
        if min(steps) < ahead or ahead < 0:
            # Where all are new the first leads.
            behind = int(mine) < ahead or (ahead < 0 and group.rank() != source)
            level(group, finish, state, source, behind)


def _finish(group: Any, work: dist.Work | gloo.PairExchange, within_s: float, severed: threading.Event) -> None:
    if isinstance(work, gloo.PairExchange):
        work.wait(within_s)
    elif nccl.is_nccl(group):
        work.wait(timedelta(seconds=within_s))
    else:
        gloo.wait(group, work, within_s, severed.is_set)


def _sever(group: Any) -> None:
    (nccl if nccl.is_nccl(group) else gloo).sever(group)
