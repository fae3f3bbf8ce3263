"""Messages between simulated processes: how they arrive, as bytes now and then, and as lines to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gossamer.process.liveness.records import Message, from_bytes, to_bytes
from gossamer.process.net.connection import Address
from gossamer.process.views import messages
from gossamer.process.views.messages import PURPOSES, ViewMessage

if TYPE_CHECKING:
    from gossamer.testing.histories.process import Process
    from gossamer.testing.histories.world import World


class Delivery:
    def __init__(self, world: World, encodes: bool, logs: bool) -> None:
        """``encodes``: messages travel as bytes, as on a real connection; that takes longer than all the rest."""
        self._world, self._encodes, self._logs = world, encodes, logs

    def send(self, sender: Process, ranks: Sequence[int], message: Message | ViewMessage) -> None:
        """Send a message to some workers, who get the same: none of them changes it."""
        world, network, peers = self._world, self._world.network, sender.machine.peers
        if self._encodes:
            message = _travelled(message, world.workers)
        size = len(_encoded(message)) if network.sizes else 0
        for rank in ranks:
            peer = peers.get(rank)
            known = None if peer is None or peer.dead else peer.record
            address = world.addresses.get(rank) if known is None else known.address
            if address is not None:
                if size:
                    network.count(size)
                network.send(sender.rank, rank, self._arrival(sender, rank, address, message))

    def _arrival(
        self, sender: Process, rank: int, address: Address, message: Message | ViewMessage
    ) -> Callable[[], None]:
        world = self._world

        def arrive() -> None:
            receiver = world.processes.get(rank)
            if receiver is None or world.addresses[rank] != address:
                world.network.send(rank, sender.rank, refuse)
            elif receiver.stopped:
                receiver.waiting.append(lambda: self._receive(receiver, sender.rank, message))
            else:
                self._receive(receiver, sender.rank, message)
                world.carry_out(receiver)

        def refuse() -> None:
            world.do(sender, lambda: sender.machine.refused(rank, address, world.now))

        return arrive

    def _receive(self, receiver: Process, sender: int, message: Message | ViewMessage) -> None:
        if self._logs:
            self._world.say(f"worker {sender} → {receiver.rank}: {_described(message)}")
        if isinstance(message, ViewMessage):
            receiver.views[message.purpose].receive(sender, message)
        else:
            receiver.machine.receive(sender, message, self._world.now)


def _encoded(message: Message | ViewMessage) -> bytes:
    return messages.to_bytes(message) if isinstance(message, ViewMessage) else to_bytes(*message)


def _travelled(message: Message | ViewMessage, workers: int) -> Message | ViewMessage:
    """Return the message as it arrives."""
    parsed: Message | ViewMessage | None
    if isinstance(message, ViewMessage):
        parsed = messages.from_bytes(_encoded(message), workers)
    else:
        parsed = from_bytes(_encoded(message), workers)
    assert parsed is not None
    return parsed


def _described(message: Message | ViewMessage) -> str:
    if not isinstance(message, ViewMessage):
        dead = f", found dead {[rank for rank, _ in message.found_dead]}" if message.found_dead else ""
        return f"{message.kind.name.lower()}, records of {[record.rank for record in message.records]}{dead}"
    members = f" of {[member.rank for member in message.members]}" if message.members else ""
    return (
        f"{message.kind.name.lower()} for {PURPOSES[message.purpose]}, requested {message.number}, "
        f"view {tuple(message.id)}{members}"
    )
