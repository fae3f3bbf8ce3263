"""A probe session: workers that measure together, the nodes they are on, and collectives that never hang.

Measuring is not training: a worker that dies ends the session. Every other worker notices within seconds and says who
it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.errors import InputError
from gossamer.process.collectives import group_builder
from gossamer.process.collectives.group_builder import GroupBuilder
from gossamer.process.collectives.group_connections import GroupConnections
from gossamer.process.collectives.membership import STUCK_S
from gossamer.process.collectives.peer_group import PeerGroup, Pending
from gossamer.process.liveness.heartbeats import Heartbeats, HeartbeatThreads
from gossamer.process.liveness.peer import Timing
from gossamer.process.roster.roster import KnownRoster, Roster
from gossamer.process.store.addresses import local_address
from gossamer.process.store.home_store import HostedStore, host_home
from gossamer.process.store.parsing import Refusals
from gossamer.process.store.rank_info import RankInfo
from gossamer.process.store.worker_addresses import WorkerAddresses

POLL_S = 0.01
MESSAGE_TIMEOUT_S = 120.0
"""No single message takes this long."""
START_TIMEOUT_S = 120.0
"""How long the others may take to start."""

T = TypeVar("T")

_HOSTED: dict[int, HostedStore] = {}
"""Stores hosted by this process, by port."""


def keep_store_alive(rank_info: RankInfo) -> None:
    """Host the store until this process ends, if it is rank 0's.

    A job that probes and then trains connects to the same address several times. A store that is closed and hosted
    again in between would forget the keys of faster workers.
    """
    if rank_info.hosts_store and rank_info.port not in _HOSTED:
        _HOSTED[rank_info.port] = host_home(rank_info.home, rank_info.identity())


class WorkerLost(Exception):
    """A worker has died."""


class ProbeSession:
    def __init__(self, rank_info: RankInfo) -> None:
        self.rank, self.workers = rank_info.rank, rank_info.workers
        keep_store_alive(rank_info)
        self.store = rank_info.connect_store()
        self.alive = list(range(self.workers))
        listener = self.store.listen(local_address(rank_info.host))
        where = WorkerAddresses(self.rank, listener.address, self.store, Refusals(lambda text: None))
        where.publish()
        self.heartbeats = Heartbeats(self.rank, KnownRoster(Roster(self.workers)), self.store, where)
        self._connections = GroupConnections(self.rank, listener, where.find)
        self._builder = GroupBuilder(self.rank, self.store, self._connections)
        self._groups: dict[tuple[str, tuple[int, ...]], PeerGroup] = {}
        self._num_shared = 0
        self._heartbeat_threads = HeartbeatThreads(self.heartbeats)
        self.addresses: list[str] = self.share("address", local_address(rank_info.host), START_TIMEOUT_S)
        self.heartbeats.all_seen = True
        self.node_of = _nodes(self.addresses)

    def close(self) -> None:
        self._heartbeat_threads.close()
        for group in self._groups.values():
            group.close()
        self._connections.close()
        self.store.close()

    def share(self, what: str, value: Any, timeout_s: float = MESSAGE_TIMEOUT_S) -> list[Any]:
        """Publish a value as JSON and return the values of all workers, in rank order."""
        self._num_shared += 1
        name = f"probe/{self._num_shared}/{what}"
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        values = []
        until = time.monotonic() + timeout_s
        for rank in range(self.workers):
            while (text := self.store.get(f"{name}/{rank}")) is None:
                announced = self.store.get("lost")
                if announced is not None or self.heartbeats.dead(rank) or time.monotonic() > until:
                    lost = rank if announced is None else int(announced)
                    self._announce_loss(lost)
                    raise WorkerLost(f"worker {lost}")
                time.sleep(POLL_S)
            values.append(json.loads(text))
        return values

    def group(self, members: tuple[int, ...], channel: str = "") -> PeerGroup:
        """Return the group of these members; each thread that communicates needs a channel of its own."""
        if (channel, members) not in self._groups:
            name = f"probe/group{channel}/" + "-".join(map(str, members))
            self._groups[channel, members] = self._builder.build(name, members, hopeless=lambda _: bool(self._dead()))
        return self._groups[channel, members]

    def barrier(self) -> None:
        self.mean(tuple(range(self.workers)), torch.zeros(1))

    def mean(self, members: tuple[int, ...], vector: Tensor, channel: str = "") -> Tensor:
        """Return the mean as training computes it: a copy, the sum, the division."""
        out = vector.clone()
        self._collective(members, channel, lambda group: group.allreduce([out]))
        return out.div_(len(members))

    def exchange(self, members: tuple[int, ...], vector: Tensor, received: Tensor) -> None:
        """Send and receive at once, as an exchange in training does."""
        self._collective(members, "", lambda group: group.exchange(vector, received))

    def gather(self, members: tuple[int, ...], vector: Tensor) -> None:
        """All-gather in two messages, as values and indices travel in training."""
        half = len(vector) // 2 or 1
        for part in (vector[:half], vector[:half]):
            outs = [torch.empty_like(part) for _ in members]
            self._collective(members, "", lambda group, outs=outs, part=part: group.allgather([outs], [part]))  # type: ignore[misc]

    def _collective(self, members: tuple[int, ...], channel: str, start: Callable[[PeerGroup], Pending]) -> None:
        def run() -> None:
            group, began = self.group(members, channel), time.monotonic()

            def abandoned() -> bool:
                # Only the neighbours of a member that has died notice by themselves.
                return time.monotonic() - began > STUCK_S and bool(self._dead())

            group_builder.wait(start(group), MESSAGE_TIMEOUT_S, abandoned)

        try:
            self.guarded(run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            raise WorkerLost("a worker") from None

    def _dead(self) -> list[int]:
        """Return the workers that have died, as announced by another worker or by their heartbeats."""
        announced = self.store.get("lost")
        if announced is not None:
            return [int(announced)]
        return [rank for rank in range(self.workers) if self.heartbeats.dead(rank)]

    def guarded(self, action: Callable[[], T]) -> T:
        """Run ``action``; if it fails because a worker has died, raise ``WorkerLost``. Other errors are its own."""
        try:
            return action()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            until = time.monotonic() + 2 * Timing().dead_s
            while time.monotonic() < until:
                dead = self._dead()
                if dead:
                    self._announce_loss(dead[0])
                    raise WorkerLost(f"worker {dead[0]}") from None
                time.sleep(0.1)
            raise

    def _announce_loss(self, lost: int) -> None:
        """Announce who has died, and stay until all others know: one that leaves earlier would count as dead too."""
        self.store.compare_set("lost", str(lost))
        self.store.set(f"noticed/{self.rank}", "1")
        until = time.monotonic() + 2 * Timing().dead_s
        others = [rank for rank in range(self.workers) if rank not in (lost, self.rank)]
        while time.monotonic() < until:
            noticed = [rank for rank in others if self.store.get(f"noticed/{rank}") is not None]
            self.alive = sorted([self.rank, *noticed])
            if len(noticed) == len(others):
                break
            time.sleep(0.1)


def _nodes(addresses: list[str]) -> list[int]:
    """Return the node of each worker: workers with the same address are on the same node."""
    distinct = list(dict.fromkeys(addresses))
    nodes = [distinct.index(address) for address in addresses]
    per_node = len(addresses) // len(distinct)
    if nodes != [rank // per_node for rank in range(len(addresses))] or len(addresses) % len(distinct):
        raise InputError(
            f"the workers are on nodes {nodes}: expected as many on each node, side by side; start them with torchrun"
        )
    return nodes
