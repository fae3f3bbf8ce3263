"""The views of a real worker: the state machines of ``view_change``, driven by messages, heartbeats and its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from gossamer.process.liveness.heartbeats import Heartbeats
from gossamer.process.liveness.liveness import Liveness
from gossamer.process.roster.roster import MAX_RANKS
from gossamer.process.store.parsing import Refusals, is_plausible
from gossamer.process.views.grouping import Grouping
from gossamer.process.views.messages import FINISH, PURPOSES, View, ViewKind, from_bytes, to_bytes
from gossamer.process.views.view_change import Installed, ProbeLinks, SendTo, Tell, ViewChange

CHECK_S = 0.02
"""How often a worker that waits for a view checks whether there is still use in that."""


class Agreement:
    """What a worker agrees on with the others, for each purpose."""

    def __init__(self, heartbeats: Heartbeats, refusals: Refusals) -> None:
        self._heartbeats, self.refusals = heartbeats, refusals
        self._changed = threading.Condition()
        rank, process, self._everybody = heartbeats.rank, heartbeats.process, heartbeats.everybody
        self.grouping = Grouping(rank, self._everybody, self._dead)
        """Who is in one group with this worker, while some cannot reach each other. Other threads only read it."""
        self._machines = [
            ViewChange(index, rank, process, self._everybody, self._gone if purpose != FINISH else self._away)
            for index, purpose in enumerate(PURPOSES)
        ]
        self._asked = [0] * len(PURPOSES)
        """What threads of this worker have requested: the machines may not know it yet."""
        heartbeats.handlers |= dict.fromkeys(ViewKind, self._on_message)
        heartbeats.on_change, heartbeats.on_tick = self._on_change, self._on_tick

    def _dead(self, rank: int) -> bool:
        return rank in self._heartbeats.lost or rank in self._everybody.value.left

    def _away(self, rank: int) -> bool:
        return self._dead(rank) or rank in self.grouping.apart

    def _gone(self, rank: int) -> bool:
        return self._away(rank) or self._heartbeats.done(rank)

    # From any thread but that of the loop

    def requested(self, purpose: str) -> int:
        """Return the number of the newest view that is requested, as far as this worker knows."""
        index = PURPOSES.index(purpose)
        return max(self._machines[index].requested, self._asked[index])

    def probe_for_lost(self, ranks: Sequence[int]) -> bool:
        """Probe the links to these, for which this worker has waited for long.

        Return whether one of them is dead, or in another group, as far as is known by now.
        """
        self._heartbeats.probe(ranks)
        return not (self._heartbeats.lost | self.grouping.apart).isdisjoint(ranks)

    def request(self, purpose: str, number: int) -> None:
        """Request a view, or a later one that is already requested."""
        index = PURPOSES.index(purpose)
        self._asked[index] = max(self._asked[index], number)
        self._do(self._machines[index], lambda: self._machines[index].request(number))

    def next_view(self, purpose: str, check: Callable[[], None]) -> View:
        """Return the next view of which this worker is a member.

        ``check()`` is called again and again, and raises if there is no use in waiting for the others.
        """
        check()
        machine = self._machines[PURPOSES.index(purpose)]
        before = machine.installed
        self._do(machine, machine.enter)
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: machine.installed is not before, CHECK_S)
                if machine.installed is not before and machine.installed is not None:
                    return machine.installed
                check()
        except BaseException:
            self._do(machine, machine.withdraw)
            raise

    def _do(self, machine: ViewChange, action: Callable[[], None]) -> None:
        def act() -> None:
            action()
            self._carry_out(machine)

        self._heartbeats.loop.call_soon(act)

    # In the thread of the loop

    def _on_message(self, sender: int, data: bytes) -> None:
        message = from_bytes(data, MAX_RANKS)
        if message is None:
            self.refusals.refuse(f"a message of worker {sender}", f"refused a message of worker {sender}")
            return
        machine = self._machines[message.purpose]
        if not is_plausible(max(message.number, message.id.number), machine.requested):
            self.refusals.refuse(f"views of worker {sender}", f"refused the number of a view of worker {sender}")
            return
        # A worker that has just come may be heard of here first; so may other members.
        self._everybody.learn_came([sender, *(member.rank for member in message.members)])
        machine.receive(sender, message)
        self._carry_out(machine)

    def _on_change(self, liveness: Liveness, ranks: set[int]) -> None:
        for rank in ranks:
            record = liveness.record(rank)
            if record is not None:
                self.grouping.hear(rank, record.unreachable)
        self.grouping.renew()
        for index, machine in enumerate(self._machines):
            machine.request(liveness.own.requests[index])
            for rank in ranks - {liveness.own.rank}:
                record = liveness.record(rank)
                if record is not None:
                    machine.heard(rank, record.process, record.views[index])
            machine.update()
            self._carry_out(machine)

    def _on_tick(self, now: float) -> None:
        for machine in self._machines:
            machine.tick(now)
            self._carry_out(machine)

    def _carry_out(self, machine: ViewChange) -> None:
        actions, machine.actions = machine.actions, []
        heartbeats, purpose = self._heartbeats, machine.purpose
        for action in actions:
            match action:
                case SendTo(ranks, message):
                    data = to_bytes(message)
                    for rank in ranks:
                        heartbeats.send(rank, data)
                case ProbeLinks(ranks):
                    heartbeats.probe(ranks)
                case Tell(number):
                    heartbeats.act(partial(Liveness.request, membership=purpose, number=number))
                case Installed(view):
                    heartbeats.act(partial(Liveness.enter, membership=purpose, mark=view.mark))
                    with self._changed:
                        self._changed.notify_all()
