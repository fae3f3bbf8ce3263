"""Membership: which workers take part in collectives, rebuilt among the survivors when a worker dies or comes back.

A membership has *generations*, each with a *view*, the list of its members:

1. Somebody requests generation g + 1: a collective failed, or a worker came back.
2. Every worker hears of it with the heartbeats, and comes as soon as it is at a collective.
3. They agree on the view by messages (``views.view_change``).
4. The members form groups among themselves and connect, each on first use.
5. Members that are behind the others take over the state of one that is not; those that were trained separately, on
   two sides of a partition, are averaged (``alignment``).

A collective over a group of workers runs among those of the group that are members. One that was in flight when its
generation ended is void: the step that waited for it is repeated (``StepRetry``), one in the background is dropped
(``CommAborted``).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from gossamer.errors import MethodError
from gossamer.process.collectives import group_builder
from gossamer.process.collectives.call import Call, Waits, mismatch
from gossamer.process.collectives.group_builder import GroupBuilder
from gossamer.process.collectives.member_entries import MemberEntries
from gossamer.process.collectives.peer_group import Pending
from gossamer.process.deadline import Deadline
from gossamer.process.lifecycle import CommAborted, StepRetry, TrainingEnded
from gossamer.process.liveness.heartbeats import Heartbeats
from gossamer.process.roster.roster import KnownRoster
from gossamer.process.state.alignment import align
from gossamer.process.state.lineage import ViewId
from gossamer.process.state.state_transfer import TransferableState
from gossamer.process.store.parsing import read_text
from gossamer.process.views.agreement import Agreement
from gossamer.process.views.messages import FINISH, NO_VIEW, TRAIN

MIN_DEADLINE_S = 60.0
"""Minimum deadline of a collective whose members are all alive; after it a new generation is requested."""

TRANSFER_TIMEOUT_S = 60.0
STUCK_S = 1.0
"""A worker that has been in one collective for this long checks whether the other members are still in it."""

LEFT_S = 5.0
"""A worker that has been in one collective for this long does not wait for members that are done: if they cannot be
reached any more, nobody notices that they have left."""

FOREGROUND, BACKGROUND, ASYNC, STATE_TRANSFER = "foreground", "background", "async", "state transfer"
"""The channels of communication, each with process groups of its own: the training thread's, that of the method's
background part, that of what the training started without waiting, and the state transfer of a new generation."""

Communication = list[dist.Work | Pending]


class Membership:
    """The members for one purpose over all generations, and the process groups among them."""

    def __init__(
        self,
        purpose: str,
        owner: str,
        everybody: KnownRoster,
        builder: GroupBuilder,
        entries: MemberEntries,
        heartbeats: Heartbeats,
        agreement: Agreement,
        state: TransferableState,
        over: Callable[[], bool],
    ) -> None:
        """``owner``: the channel that rebuilds the membership. ``over()``: nobody needs it any more."""
        self.owner, self.everybody, self.over = owner, everybody, over
        self.rank, self.builder, self.entries = builder.rank, builder, entries
        self.heartbeats, self.state = heartbeats, state
        self._finishes = purpose == FINISH
        """Otherwise workers that are done with their training are not waited for."""
        self._aligned = purpose == TRAIN
        """Members must be at the same step before they go on. Other purposes start each series with ``begin``."""
        self.purpose, self.agreement = purpose, agreement
        self.view: ViewId = NO_VIEW
        self.generation = -1
        """The number of the view."""
        self.members: list[int] = []
        self.deadline = Deadline(initial_s=300.0, min_s=MIN_DEADLINE_S)
        self.cancelled: Callable[[], bool] = lambda: False
        """Whether to agree on members is in vain: while joining, that the run has started without this worker."""
        self.needed_elsewhere: Callable[[Sequence[int]], bool] = lambda ranks: False
        """Whether one of these workers waits for this one elsewhere, and will not come to what this one waits for."""
        self.last_collective: dict[str, tuple[tuple[int, ...], float]] = {}
        """Members and start time of each channel's newest collective."""
        self._groups: dict[str, Any] = {}
        self._disconnected = threading.Event()
        """Set when the groups of this generation are closed."""
        self._started: dict[str, float] = {}
        """When the collectives in progress started, by channel."""
        self._first_rounds: dict[tuple[int, str], int] = {}
        self.waits = Waits(self.rank, entries)
        self._conflict: MethodError | None = None
        """Another member waits for this worker in another collective."""
        self._lock = threading.RLock()

    # Collectives

    def begin(self) -> None:
        """Agree on the members of a series of collectives."""
        with self._lock:
            if any(map(self._gone, self.members)):
                self.request(self.generation + 1)
            if self.requested > self.generation:
                self.rebuild(self.owner)

    def run(
        self,
        channel: str,
        communicate: Callable[[Any, Call], Communication],
        requested_call: Call,
        started_in: int | None = None,
        on_gpu: bool = False,
    ) -> tuple[list[int], Call]:
        """Run a collective among the members of the call's group; return who took part, and the call as they name it.

        Raises StepRetry if it failed and the membership was rebuilt, CommAborted if it failed and another channel has
        to rebuild it, or if the generation is not ``started_in``. MethodError if a member is in another collective.
        ``on_gpu``: tensors stay on GPUs, one per worker.
        """
        while True:
            with self._lock:
                if self.requested > self.generation:
                    if channel != self.owner:
                        # The owner rebuilds: if that is the training thread, all workers do so at the same step.
                        raise CommAborted
                    if not self._aligned:
                        raise StepRetry
                    self.rebuild(channel)
                if started_in is not None and started_in != self.generation:
                    raise CommAborted
                generation, view, disconnected = self.generation, self.view, self._disconnected
                call = self._relative(requested_call)
                members = self.members_of(call.group)
            if len(members) == 1:
                return list(members), call
            self._started[channel] = started = time.monotonic()
            self.waits.begin(channel, call, members)
            completed = False
            try:
                group = self._group(channel, view, members, on_gpu, call)
                for work in communicate(group, call):
                    self._wait(work, self.deadline.seconds, disconnected)
                completed = True
            except RuntimeError:
                if self._conflict is not None:
                    raise self._conflict from None
                with self._lock:
                    if self.generation == generation:
                        self.disconnect()
                        self.request(generation + 1)
                if self.over():
                    raise TrainingEnded from None
                if channel != self.owner:
                    raise CommAborted from None
                continue
            finally:
                self._started.pop(channel, None)
                self.waits.end(channel, completed)
            self.deadline.observe(time.monotonic() - started)
            self.last_collective[channel] = members, started
            return list(members), call

    def _wait(self, work: dist.Work | Pending, timeout_s: float, disconnected: threading.Event) -> None:
        """Wait for communication; RuntimeError if it fails, or if a member has died, even if no connection breaks."""
        began = time.monotonic()

        def abandoned() -> bool:
            # ``poll`` sees to that too, a little later.
            stuck = time.monotonic() - began > STUCK_S
            return disconnected.is_set() or (stuck and self.agreement.probe_for_lost(self.members))

        group_builder.wait(work, timeout_s, abandoned)

    def _relative(self, call: Call) -> Call:
        """Count the rounds of a topic from the first one of this generation, where members may be apart.

        At the end of a run workers have done different numbers of steps. In the background some may have completed a
        collective that failed for the others, or that came after the checkpoint from which others go on. Where the
        training rebuilds the membership, all are at the same step.
        """
        if not self._finishes and self.owner != BACKGROUND:
            return call
        first = self._first_rounds.setdefault((self.generation, call.topic), call.round)
        return replace(call, round=call.round - first)

    def members_of(self, group: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the members of this generation that are in ``group``; all of them if it is None."""
        return tuple(rank for rank in self.members if group is None or rank in group)

    def _group(
        self, channel: str, view: ViewId, members: tuple[int, ...], on_gpu: bool = False, call: Call | None = None
    ) -> Any:
        """Return the process group of one channel and topic among ``members``; built on first use."""
        about = (channel, call.name if call else "", ",".join(map(str, members)))
        generation, name = view.number, self._name(view) + "/" + hashlib.sha1(repr(about).encode()).hexdigest()[:16]
        key = STATE_TRANSFER if channel == STATE_TRANSFER else name
        groups = self._groups
        if key not in groups:

            def hopeless(awaited: tuple[int, ...]) -> bool:
                given_up = self.requested > generation or self.over() or self.cancelled() or self._conflict is not None
                return given_up or any(map(self._gone, awaited))

            def left(awaited: tuple[int, ...]) -> bool:
                """Whether members that were ready will not connect: they have given up, or died."""
                return self.requested > generation or self.over() or self.agreement.probe_for_lost(awaited)

            if call is not None:
                self._await_ready(name, members, call.first, hopeless)
            reused = None
            if channel == self.owner == FOREGROUND and not on_gpu and members == tuple(self.members):
                # The state transfer is over, and all members need this group first: no need to connect them again.
                reused = groups.pop(STATE_TRANSFER, None)
            lost = hopeless if on_gpu else left
            groups[key] = reused or self.builder.build(name, members, hopeless=lost, on_gpu=on_gpu)
            if groups is not self._groups:
                # The generation ended meanwhile.
                group_builder.disconnect(groups[key])
        return groups[key]

    def _await_ready(
        self, name: str, members: tuple[int, ...], call: str, hopeless: Callable[[tuple[int, ...]], bool]
    ) -> None:
        """Wait until all members are ready to build the group, however long they take. MethodError if their calls
        differ."""
        try:
            calls = self.entries.await_all(f"{name}/ready", call, members, hopeless)
        except RuntimeError:
            # Members that have seen this worker ready connect to it.
            self.builder.refuse(name)
            raise
        for rank in members:
            # At the end groups are released: what others have said is of their first call, long ago.
            if calls[rank] != call.encode() and not self.over():
                raise mismatch(self.rank, call, rank, read_text(calls[rank]) or "another")

    # Generations

    @property
    def requested(self) -> int:
        """The newest generation that is requested, as far as this worker knows."""
        return self.agreement.requested(self.purpose)

    def request(self, generation: int) -> None:
        """Request this generation, or a later one that is already requested."""
        self.agreement.request(self.purpose, generation)

    @property
    def key(self) -> str:
        """The name of the view. The two sides of a partition have the same generation, but not the same view."""
        return self._name(self.view)

    def _name(self, view: ViewId) -> str:
        return f"group/{self.purpose}/{view.number}-{view.leader}-{view.process}"

    def poll(self) -> None:
        """Close the groups of a collective that waits for a dead member, or that others have given up.

        Runs in the heartbeat thread.
        """
        now, started = time.monotonic(), min(list(self._started.values()), default=float("inf"))
        if now - started < STUCK_S:
            return
        in_vain = self.agreement.probe_for_lost(self.members) or self.requested > self.generation
        if in_vain or (now - started > LEFT_S and any(map(self._gone, self.members))):
            self.disconnect()
            return
        if self.waits.is_due(now, len(self.members)):
            if self.needed_elsewhere(self.members):
                self.request(self.generation + 1)
                self.disconnect()
                return
            self._conflict = self._conflict or self.waits.compare(self.key, self.members)
            if self._conflict is not None:
                self.disconnect()

    def waited_for_by(self, ranks: Iterable[int]) -> bool:
        """Return whether the training of one of ``ranks`` has been waiting for this worker in a collective for long."""
        return self.waits.any_waits(self.key, self.members, ranks, FOREGROUND)

    def rebuild(self, channel: str) -> None:
        """Agree on the members of the requested generation and bring their states to the same step.

        Raises StepRetry unless this worker is alone or this is the first generation.
        """
        while True:
            self.disconnect()
            view = self.agreement.next_view(self.purpose, self._check_wait)
            self.view, generation, members = view.id, view.id.number, view.ranks
            self.generation, self.members = generation, members
            if self.requested > generation:
                continue
            try:
                if self._aligned and len(members) > 1:
                    group = self._group(STATE_TRANSFER, view.id, tuple(members))
                    self._started[STATE_TRANSFER] = time.monotonic()
                    wait = partial(self._wait, timeout_s=TRANSFER_TIMEOUT_S, disconnected=self._disconnected)
                    align(group, wait, self.state, self.state.position(channel), view.id, members)
                    if self.owner != FOREGROUND:
                        # Nobody needs it any more: see ``_group``.
                        group_builder.release(self._groups.pop(STATE_TRANSFER, None))
                break
            except RuntimeError:
                if self.cancelled():
                    self.disconnect()
                    self.view, self.generation, self.members = NO_VIEW, -1, []
                    raise TrainingEnded from None
                self.request(generation + 1)
            finally:
                self._started.pop(STATE_TRANSFER, None)
        # Collectives among other members take another time.
        self.deadline = Deadline(initial_s=self.deadline.seconds, min_s=MIN_DEADLINE_S)
        if not self._aligned or generation == 0:
            return
        if len(members) > 1:
            raise StepRetry
        # A worker that is alone has nobody to repeat the step with: its step goes on.
        self.state.on_membership_change()

    def _check_wait(self) -> None:
        """Raise if there is no use in waiting for others to agree on the members."""
        if self.over() or self.cancelled():
            raise TrainingEnded

    def _gone(self, rank: int) -> bool:
        """Return whether another worker is dead, apart, done with its training, or has left for good."""
        if rank == self.rank or rank not in self.everybody:
            return rank != self.rank
        away = self.heartbeats.dead(rank) or rank in self.agreement.grouping.apart
        return away or (not self._finishes and self.heartbeats.done(rank))

    # Closing

    def release(self) -> None:
        """Close the groups; those in use are closed when their collective has ended."""
        groups, self._groups = self._groups, {}
        for group in list(groups.values()):
            group_builder.release(group)

    def disconnect(self) -> None:
        """Close all connections, so that threads that wait here or at the other ends notice."""
        groups, self._groups = self._groups, {}
        disconnected, self._disconnected = self._disconnected, threading.Event()
        disconnected.set()
        for group in list(groups.values()):
            group_builder.disconnect(group)
