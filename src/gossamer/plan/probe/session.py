"""Workers that measure together: who is there, on which node, and process groups over which nobody waits for ever.

Measuring is not training: a worker that is lost ends it. Everybody notices within seconds and says who it was.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.errors import InputError
from gossamer.process.collectives import gloo
from gossamer.process.collectives.membership import STUCK_S
from gossamer.process.store.heartbeats import DEAD_S, Heartbeats
from gossamer.process.store.rank_info import RankInfo, own_host

POLL_S = 0.01
BEAT_S = 0.2
MEET_S = 30.0
"""How long members of a group may wait for each other."""
BUILD_S = 5.0
"""How long it may take to build a group whose members are all there."""
WAIT_S = 120.0
"""No single message takes so long."""
START_S = 120.0
"""How long the others may take to come."""


_HELD: dict[int, dist.Store] = {}


def hold_store(rank_info: RankInfo) -> None:
    """Let the store at which workers meet live as long as this process, if it hosts it.

    Whoever measures and then trains meets several times at the same address, and a store that went and came back would
    have forgotten those who were quicker.
    """
    hosted_by_others = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank_info.rank == 0 and not hosted_by_others and rank_info.port not in _HELD:
        _HELD[rank_info.port] = dist.TCPStore(
            rank_info.host,
            rank_info.port,
            None,
            True,
            timedelta(seconds=START_S),
            wait_for_workers=False,
            multi_tenant=True,
        )


class LostWorker(Exception):
    """A worker is not there any more."""


class ProbeSession:
    """This worker among those that measure."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.rank_info, self.rank, self.workers = rank_info, rank_info.rank, rank_info.workers
        hold_store(rank_info)
        self.point = rank_info.connect_store()
        self.heartbeats = Heartbeats(rank_info.rank, self.point)
        self.here = list(range(rank_info.workers))
        """Who is still there."""
        self._groups: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._asked = 0
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="gossamer-probe-beat", daemon=True)
        self._beating.start()
        addresses = self.tell("address", own_host(rank_info.host), START_S)
        self.heartbeats.all_born = True
        self.node_of = _nodes(addresses)

    def _beat(self) -> None:
        while not self._over.is_set():
            try:
                self.heartbeats.beat()
            except RuntimeError:
                return
            self._over.wait(BEAT_S)

    def close(self) -> None:
        self._over.set()
        self._beating.join(2.0)
        self._groups.clear()
        self.point.close()

    def tell(self, what: str, value: Any, within_s: float = WAIT_S) -> list[Any]:
        """Tell everybody, and hear what everybody has to tell."""
        self._asked += 1
        name = f"probe/{self._asked}/{what}"
        self.point.set(f"{name}/{self.rank}", json.dumps(value))
        heard = []
        until = time.monotonic() + within_s
        for rank in range(self.workers):
            while (found := self.point.get(f"{name}/{rank}")) is None:
                said = self.point.get("lost")
                if said is not None or self.heartbeats.dead(rank) or time.monotonic() > until:
                    lost = rank if said is None else int(said)
                    self._notice(lost)
                    raise LostWorker(f"worker {lost}")
                time.sleep(POLL_S)
            heard.append(json.loads(found))
        return heard

    def group(self, members: tuple[int, ...], lane: str = "") -> Any:
        """The process group of these members; each thread that communicates needs a lane of its own."""
        if (lane, members) not in self._groups:
            name = f"probe/group{lane}/" + "-".join(map(str, members))
            group_rank = members.index(self.rank)
            store = self.point.store(MEET_S, hopeless=lambda: bool(self._gone()))
            self._groups[lane, members] = self._guarded(
                lambda: gloo.make_group(store, name, group_rank, len(members), BUILD_S)
            )
        return self._groups[lane, members]

    def barrier(self) -> None:
        """Wait until everybody is here."""
        self.mean(tuple(range(self.workers)), torch.zeros(1))

    def mean(self, members: tuple[int, ...], vector: Tensor, lane: str = "") -> Tensor:
        """As in training: a copy, the sum, its share."""
        out = vector.clone()
        self._wait(members, lane, lambda group: group.allreduce([out], dist.AllreduceOptions()))
        return out.div_(len(members))

    def exchange(self, members: tuple[int, ...], vector: Tensor, received: Tensor) -> None:
        """Both ways at once, as in training."""
        self._guarded(lambda: gloo.PairExchange(self.group(members), vector, received).wait(WAIT_S))

    def gather(self, members: tuple[int, ...], vector: Tensor) -> None:
        """Everybody's vector to everybody, in two messages, as values and indices travel."""
        half = len(vector) // 2 or 1
        for part in (vector[:half], vector[:half]):
            outs = [torch.empty_like(part) for _ in members]
            self._wait(members, "", lambda group, outs=outs, part=part: group.allgather([outs], [part]))  # type: ignore[misc]

    def _wait(self, members: tuple[int, ...], lane: str, start: Callable[[Any], dist.Work]) -> None:
        """A collective operation; gloo may not notice that one of its members is gone."""

        def whole() -> None:
            group, began = self.group(members, lane), time.monotonic()
            gloo.wait(group, start(group), WAIT_S, lambda: time.monotonic() - began > STUCK_S and bool(self._gone()))

        self._guarded(whole)

    def _gone(self) -> list[int]:
        """Who is not there any more: somebody says so who has heard it first, or it shows in their silence."""
        said = self.point.get("lost")
        return [int(said)] if said is not None else [rank for rank in range(self.workers) if self.heartbeats.dead(rank)]

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except RuntimeError:
            until = time.monotonic() + 2 * DEAD_S
            while time.monotonic() < until:
                gone = self._gone()
                if gone:
                    self._notice(gone[0])
                    raise LostWorker(f"worker {gone[0]}") from None
                time.sleep(0.1)
            raise LostWorker("a worker") from None

    def _notice(self, lost: int) -> None:
        """Say who is gone, and stay until all others have heard it: whoever leaves before would be taken for it."""
        self.point.claim("lost", str(lost))
        self.point.set(f"noticed/{self.rank}", "1")
        until = time.monotonic() + 2 * DEAD_S
        others = [rank for rank in range(self.workers) if rank not in (lost, self.rank)]
        while time.monotonic() < until:
            heard = [rank for rank in others if self.point.get(f"noticed/{rank}") is not None]
            self.here = sorted([self.rank, *heard])
            if len(heard) == len(others):
                break
            time.sleep(0.1)


def _nodes(addresses: list[str]) -> list[int]:
    """Which node each worker is on: workers with the same address are on the same one."""
    job_spec = list(dict.fromkeys(addresses))
    nodes = [job_spec.index(address) for address in addresses]
    per_node = len(addresses) // len(job_spec)
    if nodes != [rank // per_node for rank in range(len(addresses))] or len(addresses) % len(job_spec):
        raise InputError(
            f"the workers are on nodes {nodes}: expected as many on each node, side by side; start them with torchrun"
        )
    return nodes
