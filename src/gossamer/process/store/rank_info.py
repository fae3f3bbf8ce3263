"""Which worker this process is, and where it meets the others, as torchrun, SLURM or a test say in the environment."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import sys
from collections import deque
from dataclasses import dataclass

import torch.distributed as dist

from gossamer.errors import InputError
from gossamer.process.store.failover_store import FailoverStore

START_S = 300.0
"""How long the others may take to come to the first meeting."""

_joined = itertools.count()
"""A process may join several times, with several models or one after the other: all workers in the same order."""


@dataclass(frozen=True)
class RankInfo:
    """One process among many."""

    rank: int
    workers: int
    host: str
    port: int
    prefix: str

    def connect_store(self) -> FailoverStore:
        """The store at which the run begins; rank 0 hosts it unless torchrun does."""
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return FailoverStore(self.host, self.port, self.rank == 0 and not agent, self.prefix, START_S)


def find_rank() -> tuple[int, int]:
    """This process's rank, and of how many: the user's process group's, torchrun's, SLURM's, or a lone worker's."""
    env = os.environ
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in env and "WORLD_SIZE" in env:
        return _number("RANK"), _number("WORLD_SIZE")
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        return _number("SLURM_PROCID"), _number("SLURM_NTASKS")
    return 0, 1


def find_local_rank() -> int:
    """This process's number among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def find_rank_info() -> RankInfo:
    """This process's place for one more meeting: all workers have to ask as often."""
    env = os.environ
    rank, workers = find_rank()
    if not 0 <= rank < workers:
        raise InputError(f"this worker's rank is {rank} of {workers} workers: expected 0 to {workers - 1}")
    if workers > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise InputError("MASTER_ADDR and MASTER_PORT are not set: start the workers with torchrun, or set them")
    host = env.get("MASTER_ADDR", "127.0.0.1")
    port = _number("MASTER_PORT") if "MASTER_PORT" in env else free_port()
    run = f"{env.get('TORCHELASTIC_RUN_ID', 'run')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return RankInfo(rank, workers, host, port, f"gossamer/{run}/{next(_joined)}/")


def started_rank_info() -> RankInfo | None:
    """Which worker this process is, if somebody started it as one of several."""
    env = os.environ
    if {"RANK", "WORLD_SIZE"} <= env.keys() or env.get("SLURM_NTASKS", "1") != "1":
        return find_rank_info()
    return None


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise InputError(f"{name} is {os.environ[name]!r} in the environment: expected a whole number") from None


_claims: deque[int] = deque()
"""Open files that stand for the ports given out last."""

_MOST_CLAIMS = 64


def free_port() -> int:
    """A port that nobody listens on, and that no other process is given by this function for a while.

    Not one that the system would choose: it gives those away to connections, and the next of them may get this one.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 16_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if sys.platform == "linux":
                _claim(port)
            return port


def _claim(port: int) -> None:
    """Take a name that one process at a time can have, and that is free again when it ends; OSError if it is taken.

    Where such names are not to be had ports are given out all the same.
    """
    with contextlib.suppress(PermissionError), socket.socket(socket.AF_UNIX) as name:
        name.bind(f"\0gossamer port {port}")
        _claims.append(name.detach())
    if len(_claims) > _MOST_CLAIMS:
        os.close(_claims.popleft())


def own_host(meeting_host: str) -> str:
    """The address under which the others reach this process: that of the way to the meeting store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only looks up the way.
        probe.connect((socket.gethostbyname(meeting_host), 9))
        return str(probe.getsockname()[0])
