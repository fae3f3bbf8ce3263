"""Averages over groups of workers, rebuilt among the survivors when a member leaves or comes back.

A group has *generations*. In each, its members agree at the meeting point on who is present, and build process groups
for that. When a communication fails, or a worker comes back, somebody asks for the next generation; everybody hears of
it beside its training and says that it is there; those who say so in time are the members of that generation. A member
that is behind the others then takes over their state, so that all go on from the same place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.process.beats import Beats
from gossamer.process.deadline import Deadline
from gossamer.process.gloo import make_group
from gossamer.process.meeting_point import MeetingPoint

POLL_S = 0.02
BUILD_S = 10.0

START, TRAIN, FINISH = "start", "train", "finish"
"""Names of the group that begins the run, of those that train, and of the one that ends it."""

FOREGROUND = "foreground"
"""The lane of the training thread."""


class Void(Exception):
    """The group was rebuilt: the step that was being made does not count, and is made again from the same place."""


class Aborted(Exception):
    """What was under way beside the training was lost with its group."""


class Stopped(Exception):
    """Training has ended."""


class State(Protocol):
    """What a member that is behind takes over."""

    def position(self, lane: str) -> int:
        """How far this worker is, as the thread that uses ``lane`` sees it; −1 if it is new."""

    def tensors(self) -> list[Tensor]:
        """Everything that is taken over, in host memory, in one order on all workers."""

    def take(self, tensors: list[Tensor]) -> None:
        """Go on from these."""

    def regrouped(self) -> None:
        """The group has a new generation: drop what was under way in the old one."""


class Group:
    """One group of workers, over its generations."""

    def __init__(self, groups: Groups, name: str, members: tuple[int, ...]) -> None:
        self.groups, self.members = groups, members
        self.until_done = name not in (START, FINISH)
        """A worker that is done with its training has left this group."""
        self.aligned = name in (START, TRAIN)
        """Members of this group have to be at the same place before they go on."""
        self.key = f"group/{name}/" + hashlib.sha1(",".join(map(str, members)).encode()).hexdigest()[:16]
        self.generation = -1
        self.wanted = 0
        self.present: list[int] = []
        self.deadline = Deadline(first_s=300.0, least_s=10.0)
        self.given_up: Callable[[], bool] = lambda: False
        """Whether there is no point in waiting for this group any more."""
        self._lanes: dict[str, Any] = {}
        self._has_foreground = False
        self._lock = threading.RLock()

    def run(self, lane: str, communicate: Callable[[Any], list[dist.Work]]) -> list[int]:
        """Communicate among those present, and again among the survivors if that fails; returns who took part."""
        self._has_foreground |= lane == FOREGROUND
        while True:
            with self._lock:
                if self.wanted > self.generation:
                    if lane != FOREGROUND and self._has_foreground:
                        # Those that train rebuild it, all at the same step.
                        raise Aborted
                    self.regroup(lane)
                generation, present = self.generation, self.present
                if len(present) == 1:
                    return present
            began = time.monotonic()
            try:
                lane_group = self._lane(lane, generation, present)
                for work in communicate(lane_group):
                    work.wait(timedelta(seconds=self.deadline.seconds))
            except RuntimeError:
                with self._lock:
                    if self.generation == generation:
                        self._lanes.clear()
                        self.want(generation + 1)
                    if self.groups.stopped():
                        raise Stopped from None
                continue
            self.deadline.observe(time.monotonic() - began)
            return present

    def want(self, generation: int) -> None:
        """Ask everybody for this generation."""
        self.wanted = max(self.wanted, generation)
        self.groups.point.set(f"{self.key}/wanted", str(self.wanted))

    def tend(self) -> None:
        """Hear of a generation that somebody asked for, and say that we are there; beside the training."""
        found = self.groups.point.get(f"{self.key}/wanted")
        if found is not None and int(found) > self.generation:
            self.wanted = max(self.wanted, int(found))
        elif found is not None and int(found) < self.generation:
            # Somebody has come who does not know how far we are.
            self.want(self.generation + 1)
        if self.wanted > self.generation:
            self.groups.point.set(f"{self.key}/{self.wanted}/here/{self.groups.rank}", "1")

    def regroup(self, lane: str) -> None:
        """Agree with the others on who is there, and start afresh among them."""
        first = self.generation < 0 and self.wanted == 0
        while True:
            generation = self.wanted
            present = self._agree(generation)
            if self.wanted > generation:
                continue
            if self.groups.rank not in present:
                self.want(generation + 1)
                continue
            self.generation, self.present = generation, present
            self._lanes.clear()
            if len(present) == 1:
                break
            try:
                if self.aligned:
                    self._align(self._lane("align", generation, present), lane)
                break
            except RuntimeError:
                self._lanes.clear()
                self.want(generation + 1)
        self.deadline = Deadline(first_s=self.deadline.seconds if not first else 300.0, least_s=10.0)

    def _agree(self, generation: int) -> list[int]:
        point, rank = self.groups.point, self.groups.rank
        name = f"{self.key}/{generation}"
        while True:
            if self.groups.stopped() or self.given_up():
                raise Stopped
            point.set(f"{name}/here/{rank}", "1")
            found = point.get(f"{name}/members")
            if found is not None:
                return list(json.loads(found))
            here = [member for member in self.members if point.get(f"{name}/here/{member}") is not None]
            gone = [member for member in self.members if member not in here and self._gone(member)]
            if rank == min(here, default=-1) and len(here) + len(gone) == len(self.members):
                claimed = point.claim(f"{name}/members", json.dumps(here))
                if claimed is not None:
                    return list(json.loads(claimed))
            newer = point.get(f"{self.key}/wanted")
            if newer is not None and int(newer) > generation:
                self.wanted = int(newer)
                return []
            time.sleep(POLL_S)

    def _gone(self, member: int) -> bool:
        """Whether ``member`` is dead, or done with its training."""
        done = self.until_done and self.groups.point.get(f"done/{member}") is not None
        return done or self.groups.beats.dead(member)

    def _lane(self, lane: str, generation: int, present: list[int]) -> Any:
        """The process group for one thread of communication in one generation."""
        key = f"{generation}/{lane}"
        if key not in self._lanes:
            place = present.index(self.groups.rank)
            store = self.groups.point.store(BUILD_S)
            self._lanes[key] = make_group(store, f"{self.key}/{key}", place, len(present), BUILD_S)
        return self._lanes[key]

    def _align(self, group: Any, lane: str) -> None:
        """Let members that are behind take over the state of one that is not."""
        state = self.groups.state
        mine = torch.tensor([state.position(lane)])
        positions = [torch.zeros_like(mine) for _ in self.present]
        group.allgather([positions], [mine]).wait(timedelta(seconds=BUILD_S))
        steps = [int(position) for position in positions]
        ahead = max(steps)
        if self.generation > 0:
            state.regrouped()
        if min(steps) < ahead:
            self._level(group, steps.index(ahead), int(mine) < ahead)
        if self.generation > 0 and lane == FOREGROUND:
            raise Void

    def _level(self, group: Any, source: int, behind: bool) -> None:
        """Send the state of the member at ``source`` to those that are behind."""
        state = self.groups.state
        tensors = state.tensors()
        for tensor in tensors:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = source, 0
            group.broadcast([tensor], options).wait(timedelta(seconds=60))
        if behind:
            state.take(tensors)


class Groups:
    """All groups this worker is in."""

    def __init__(self, rank: int, point: MeetingPoint, beats: Beats, state: State, stopped: Callable[[], bool]) -> None:
        self.rank, self.point, self.beats, self.state, self.stopped = rank, point, beats, state, stopped
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}
        self._lock = threading.Lock()

    def group(self, members: tuple[int, ...], name: str = TRAIN) -> Group:
        """The group of these members that is called ``name``."""
        with self._lock:
            key = (name, members)
            if key not in self._groups:
                self._groups[key] = Group(self, name, members)
            return self._groups[key]

    def tend(self) -> None:
        """Hear what the other members want; beside the training."""
        for group in list(self._groups.values()):
            group.tend()

    def mean(self, group: Group, lane: str, vector: Tensor) -> Tensor:
        """The mean of ``vector`` over the members that are there, in host memory."""
        out = torch.empty_like(vector)

        def communicate(lane_group: Any) -> list[dist.Work]:
            out.copy_(vector)
            return [lane_group.allreduce([out], dist.AllreduceOptions())]

        present = group.run(lane, communicate)
        return out.copy_(vector) if len(present) == 1 else out.div_(len(present))

    def gather(self, group: Group, lane: str, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """Everybody's tensors, in rank order, in host memory."""
        collected: list[list[Tensor]] = []

        def communicate(lane_group: Any) -> list[dist.Work]:
            collected[:] = [[torch.empty_like(tensor) for _ in range(lane_group.size())] for tensor in tensors]
            return [lane_group.allgather([out], [tensor]) for out, tensor in zip(collected, tensors, strict=True)]

        present = group.run(lane, communicate)
        if len(present) == 1:
            return [tensors]
        return list(zip(*collected, strict=True))

    def close(self) -> None:
        """Let go of all groups; the others notice and go on."""
        with contextlib.suppress(RuntimeError):
            for group in self._groups.values():
                group._lanes.clear()
