"""How workers agree on a view: a state machine without threads, clocks and sockets.

Inputs are messages, times, what this worker does and who is gone; outputs are actions. Driven by ``agreement`` in real
workers and by ``gossamer.testing.histories`` in simulated ones. The protocol is a view change in two phases, as in
virtual synchrony (Birman and Joseph, 1987) and viewstamped replication (Oki and Liskov, 1988):

1. Somebody requests view n: a collective failed, or a worker came back. Heartbeats tell everybody.
2. Whoever waits for view n says so to the *coordinator*: the lowest rank that is not gone.
3. Once everybody waits for it, or is gone, the coordinator proposes the list of members.
4. A member accepts it, and from then on no lower view. Once all have accepted, the coordinator installs the view.

Whatever goes wrong on the way leads to a request of view n + 1: a member dies, does not wait any more, or has accepted
a proposal of somebody else. A view is named by its number, its coordinator and the coordinator's process, so no two
lists of members ever have one name. A coordinator that dies is a member of all views that it has proposed: none of them
can go on, and its successor need not know about them. Every message is repeated until it is answered; none does harm if
it comes twice, late, or in another order.

No view has both ends of a link that is cut, though both are alive. Whoever cannot reach another one says so in its
heartbeats, and all divide the workers into the same groups (``grouping``). Who is in another group counts as gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from gossamer.process.state.lineage import ViewId
from gossamer.process.views.messages import NO_VIEW, Member, View, ViewKind, ViewMessage

NEVER = float("-inf")
RETRY_S = 0.2
"""After how long a message without an answer is repeated."""

PROBE_AFTER = 2
"""Who has said something again so often finds out whether those can be reached who do not answer."""

SETTLE_S = 1.0
"""How long after a view was installed its members may differ in who is gone. Whoever is alive then and in another view
has gone on without them."""


class SendTo(NamedTuple):
    """Send a message to some workers. It may be lost or late."""

    ranks: tuple[int, ...]
    message: ViewMessage


class ProbeLinks(NamedTuple):
    """Find out whether these workers can be reached: this one has waited for them for long."""

    ranks: tuple[int, ...]


class Tell(NamedTuple):
    """Tell everybody that a view is requested."""

    number: int


class Installed(NamedTuple):
    """This worker is a member of a view that begins now."""

    view: View


class ViewChange:
    """The part of one worker in the views for one purpose."""

    def __init__(
        self, purpose: int, rank: int, process: int, everybody: Collection[int], gone: Callable[[int], bool]
    ) -> None:
        """``everybody``: who belongs to the run now, ascending. ``gone(rank)``: that worker is dead, done or in
        another group (``grouping``), so views are without it."""
        self.purpose, self.own, self.everybody, self._gone = purpose, Member(rank, process), everybody, gone
        self.requested = 0
        """The newest view that is requested, as far as this worker knows."""
        self.installed: View | None = None
        self.waits = False
        """This worker waits for the next view."""
        self.actions: list[SendTo | ProbeLinks | Tell | Installed] = []
        self._promised = NO_VIEW
        """The highest view that this worker has accepted or proposed."""
        self._accepted: ViewId | None = None
        """The view for whose installation this worker waits."""
        self._present: dict[int, tuple[int, ViewId]] = {}
        """Who waits for the requested view: their processes, and the highest view that each has accepted."""
        self._proposal: View | None = None
        """Of this worker, as the coordinator."""
        self._yet_to_accept: set[int] = set()
        self._awaited = rank
        """Somebody who was not present when this worker looked last."""
        self._said_to: int | None = None
        """The coordinator to which this worker has said that it is present."""
        self._sent_at = self._compared_at = NEVER
        self._num_repeated = 0
        """How often something was said again since this worker waits."""
        self._processes: dict[int, int] = {}
        self._marks: dict[int, int] = {}
        """In which view each other worker is."""

    # What the worker does

    def enter(self) -> None:
        """This worker waits for the next view from now on."""
        self.waits = True
        if self.installed is not None and self.requested <= self.installed.id.number:
            self.request(self.installed.id.number + 1)
        else:
            self._say_present()

    def withdraw(self) -> None:
        """This worker does not wait any more."""
        self.waits, self._accepted, self._said_to = False, None, None
        self._proposal = None

    def request(self, number: int) -> None:
        """View ``number`` is requested, here or by somebody else."""
        if number <= self.requested:
            return
        self.requested = number
        self._present.clear()
        self._accepted = None
        self._proposal = None
        self.actions.append(Tell(number))
        if self.waits:
            self._say_present()

    # What heartbeats tell

    def update(self) -> None:
        """Somebody is gone or there again."""
        if not self.waits:
            return
        if self._accepted is not None and self._gone(self._accepted.leader):
            self._accepted = None
        if self._accepted is None and self._said_to != self._coordinator():
            self._say_present()
        else:
            self._coordinate()

    def heard(self, rank: int, process: int, mark: int) -> None:
        """A process of a worker is in the view with this mark; 0: in none yet."""
        if self._processes.get(rank, process) != process:
            # What the process before it has said does not count any more.
            self._present.pop(rank, None)
        self._processes[rank], self._marks[rank] = process, mark

    def tick(self, now: float) -> None:
        """Do what is due; call it now and then."""
        if not self.waits:
            self._sent_at = NEVER
            self._compare(now)
        elif self._sent_at == NEVER:
            self._sent_at, self._compared_at, self._num_repeated = now, NEVER, 0
        elif now - self._sent_at >= RETRY_S:
            self._sent_at = now
            self._repeat()

    def _compare(self, now: float) -> None:
        """Request a view for all if others went on without this worker, on the other side of a partition."""
        view = self.installed
        if view is None or self.requested > view.id.number:
            return
        if self._compared_at == NEVER:
            self._compared_at = now
        if now - self._compared_at < SETTLE_S:
            return
        self._compared_at = now
        members = set(view.ranks)
        for rank, mark in self._marks.items():
            if mark not in (0, view.mark) and rank not in members and not self._gone(rank):
                self.request(view.id.number + 1)
                return

    def _repeat(self) -> None:
        self.update()
        self._num_repeated += 1
        if self._num_repeated > PROBE_AFTER and self.waits:
            # The members of a view have to reach each other too. They come second: a few are probed at a time.
            self.actions += [
                ProbeLinks(self._waits_for()),
                ProbeLinks(tuple(rank for rank in self.everybody if rank != self.own.rank)),
            ]
        if self._proposal is not None:
            self._send(sorted(self._yet_to_accept), ViewKind.PROPOSE, self._proposal)
        elif self._accepted is not None:
            self._send([self._accepted.leader], ViewKind.ACCEPT, self._accepted)
        else:
            self._say_present()

    def _waits_for(self) -> tuple[int, ...]:
        if self._proposal is not None:
            return tuple(self._yet_to_accept)
        if self._accepted is not None:
            return (self._accepted.leader,)
        coordinator = self._coordinator()
        return (self._awaited if coordinator == self.own.rank else coordinator,)

    # Messages

    def receive(self, sender: int, message: ViewMessage) -> None:
        view = View(message.id, message.members)
        match message.kind:
            case ViewKind.PRESENT:
                self._on_present(sender, message)
            case ViewKind.PROPOSE:
                self._on_propose(sender, view)
            case ViewKind.ACCEPT:
                self._on_accept(Member(sender, message.process), message.id)
            case ViewKind.INSTALL:
                self._on_install(sender, view)
            case ViewKind.ABSENT:
                self._on_absent(sender, message.id)
            case ViewKind.REQUESTED:
                self.request(message.number)

    def _on_present(self, sender: int, message: ViewMessage) -> None:
        if self._gone(sender) and self._processes.get(sender) == message.process:
            # It hangs: its network thread would request views without end, since it is in none of them.
            return
        self.request(message.number)
        if not self.waits and self.installed is not None and self.installed.id.number >= self.requested:
            # It has missed that this view was installed, or has to request one in which it is a member.
            self._send([sender], ViewKind.INSTALL, self.installed)
        elif message.number < self.requested:
            self._send([sender], ViewKind.REQUESTED)
        else:
            self._present[sender] = message.process, message.id
            self._coordinate()

    def _on_propose(self, sender: int, view: View) -> None:
        if self.own.rank not in view.ranks or (self.installed is not None and self.installed.id == view.id):
            return
        if not self.waits or self.own not in view.members:
            # Or the process before this one was present, and is a member: it will not come.
            self._send([sender], ViewKind.ABSENT, view.id)
            return
        if view.id.number < self.requested or view.id < self._promised:
            # The loser of a race goes to a higher number.
            self.request(self._promised.number + 1)
            self._send([sender], ViewKind.REQUESTED)
            return
        if view.id != self._accepted:
            self.request(view.id.number)
            self._proposal = None
            self._promised = self._accepted = view.id
        self._send([sender], ViewKind.ACCEPT, view.id)

    def _on_accept(self, sender: Member, id: ViewId) -> None:
        if self._proposal is not None and self._proposal.id == id:
            if sender in self._proposal.members:
                self._yet_to_accept.discard(sender.rank)
                self._install_if_accepted()
        elif self.installed is not None and self.installed.id == id:
            self._send([sender.rank], ViewKind.INSTALL, self.installed)
        else:
            self.request(id.number + 1)
            self._send([sender.rank], ViewKind.REQUESTED)

    def _on_install(self, sender: int, view: View) -> None:
        if self.installed is not None and self.installed.id == view.id:
            return
        if view.id.number < self.requested:
            return
        if self.own not in view.members:
            if self.waits:
                self.request(view.id.number + 1)
        elif self.waits:
            self._install(view)
        else:
            self._send([sender], ViewKind.ABSENT, view.id)

    def _on_absent(self, sender: int, id: ViewId) -> None:
        """A member does not come to a view that was proposed or installed."""
        if any(view is not None and view.id == id for view in (self._proposal, self.installed)):
            self.request(id.number + 1)

    # The coordinator

    def _coordinator(self) -> int:
        there = (rank for rank in self.everybody if rank == self.own.rank or not self._gone(rank))
        return next(there, self.own.rank)

    def _coordinate(self) -> None:
        """Propose a view once everybody is present or gone."""
        if not self.waits or self._accepted is not None:
            return
        if self._proposal is not None:
            # Also if somebody else is the coordinator by now: who has accepted it waits for this one.
            if any(self._left_out(member) for member in self._proposal.members):
                self.request(self._proposal.id.number + 1)
            return
        if self._coordinator() != self.own.rank or self._is_awaited(self._awaited):
            return
        for rank in self.everybody:
            if self._is_awaited(rank):
                self._awaited = rank
                return
        self._propose()

    def _is_awaited(self, rank: int) -> bool:
        return rank != self.own.rank and rank not in self._present and not self._gone(rank)

    def _left_out(self, member: Member) -> bool:
        """Return whether a member will not come any more: it is gone, or another process is in its place."""
        if member == self.own:
            return False
        return self._gone(member.rank) or self._present.get(member.rank, (0,))[0] != member.process

    def _propose(self) -> None:
        # Some may have died, or ended their training, after they were present.
        there = {rank: present for rank, present in self._present.items() if not self._gone(rank)}
        highest = max([self._promised, *(promised for _, promised in there.values())])
        id = self._name(self.requested)
        if id <= highest:
            id = self._name(highest.number + 1)
            self.requested = id.number
            self.actions.append(Tell(id.number))
        members = [self.own, *(Member(rank, process) for rank, (process, _) in there.items())]
        self._proposal = View(id, tuple(sorted(members)))
        self._promised, self._yet_to_accept = id, set(there)
        self._send(sorted(there), ViewKind.PROPOSE, self._proposal)
        self._install_if_accepted()

    def _name(self, number: int) -> ViewId:
        return ViewId(number, *self.own)

    def _install_if_accepted(self) -> None:
        if self._proposal is not None and not self._yet_to_accept:
            view = self._proposal
            self._send([rank for rank in view.ranks if rank != self.own.rank], ViewKind.INSTALL, view)
            self._install(view)

    def _install(self, view: View) -> None:
        self.installed, self._promised, self._compared_at = view, max(view.id, self._promised), NEVER
        self.requested = max(self.requested, view.id.number)
        self.waits, self._accepted, self._said_to = False, None, None
        self._proposal = None
        self._present.clear()
        self.actions.append(Installed(view))

    # Sending

    def _say_present(self) -> None:
        self._said_to = coordinator = self._coordinator()
        if coordinator == self.own.rank:
            self._coordinate()
            if self.waits and self._proposal is None and self._is_awaited(self._awaited):
                # It may be in a view that this worker does not know of.
                self._send([self._awaited], ViewKind.PRESENT, self._promised)
        else:
            self._send([coordinator], ViewKind.PRESENT, self._promised)

    def _send(self, ranks: list[int], kind: ViewKind, about: View | ViewId = NO_VIEW) -> None:
        id, members = about if isinstance(about, View) else (about, ())
        message = ViewMessage(kind, self.purpose, self.own.process, self.requested, id, members)
        if ranks:
            self.actions.append(SendTo(tuple(ranks), message))
