"""Which rank this process has and where the store is, as torchrun, SLURM or the environment say."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from gossamer.errors import InputError
from gossamer.process.net.connection import Address
from gossamer.process.net.identity import Identity
from gossamer.process.net.secret import find_secret
from gossamer.process.net.tls import TlsFiles, find_tls_files, make_tls
from gossamer.process.roster.roster import Roster
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host

START_TIMEOUT_S = 300.0
"""How long a worker waits for the others to start."""

LAUNCHER_STORE = "GOSSAMER_STORE"
"""The variable in which ``gossamer launch`` tells its workers where the store is that it hosts: HOST:PORT."""

_num_joins = itertools.count()
"""A process may join several times, with several models or one after the other; all workers join in the same order."""


@dataclass(frozen=True)
class RankInfo:
    """One worker of a job: its rank, the number of workers, the store's address and the prefix of the job's keys."""

    rank: int
    workers: int
    host: str
    port: int
    prefix: str
    run: str = "run"
    """The name of the run, which all its processes know."""
    secret: bytes = field(default=b"", repr=False)
    """Which all processes of the run know, and nobody else; empty: there is none."""
    store_host: Host = Host.RANK_0
    tls: TlsFiles | None = None
    """None: connections are not encrypted."""
    came: frozenset[int] = frozenset()
    """Workers that came later than the first ``workers``, this one among them if it did."""
    reached_at: Address | None = None
    """Where a worker that comes later has found a store of the run; it may be another one than ``host``'s."""

    @property
    def roster(self) -> Roster:
        """Who belongs to the run, as far as is known before the store is asked."""
        return Roster(self.workers, self.came)

    @property
    def hosts_store(self) -> bool:
        """Rank 0 hosts the store, unless a launcher of ours does."""
        return self.rank == 0 and self.store_host != Host.LAUNCHER

    @property
    def home(self) -> Home:
        key = f"gossamer/{self.run}/home" if self.store_host == Host.RANK_0_ANYWHERE else ""
        return Home(self.host, self.port, self.store_host, key)

    def identity(self) -> Identity:
        """Return the identity of one more process of this rank."""
        tls = None if self.tls is None else make_tls(self.tls)
        return Identity(self.rank, self.run, self.secret, tls=tls)

    def connect_store(
        self,
        timeout_s: float = START_TIMEOUT_S,
        on_wait: Callable[[str], None] = lambda text: None,
        on_refused: Callable[[str], None] = lambda text: None,
    ) -> FailoverStore:
        return FailoverStore(
            self.home, self.identity(), self.prefix, timeout_s, on_wait, on_refused, reached_at=self.reached_at
        )


def find_rank() -> tuple[int, int]:
    """Return (rank, number of workers) of the user's process group, of torchrun, of SLURM, or (0, 1)."""
    env = os.environ
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in env and "WORLD_SIZE" in env:
        return _env_int("RANK"), _env_int("WORLD_SIZE")
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        return _env_int("SLURM_PROCID"), _env_int("SLURM_NTASKS")
    return 0, 1


def find_local_rank() -> int:
    """Return this process's rank among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def find_rank_info(tls: TlsFiles | None = None) -> RankInfo:
    """Return this process's rank info for one more join. All workers must call this equally often.

    ``tls``: by default what the environment says.
    """
    env = os.environ
    rank, workers = find_rank()
    if not 0 <= rank < workers:
        raise InputError(f"this worker's rank is {rank} of {workers} workers: expected 0 to {workers - 1}")
    if workers > 1 and not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
        raise InputError("MASTER_ADDR and MASTER_PORT are not set: start the workers with torchrun, or set them")
    host = env.get("MASTER_ADDR", "127.0.0.1")
    port = _env_int("MASTER_PORT") if "MASTER_PORT" in env else free_port()
    run = run_name()
    # Torchrun's agent, or rank 0 of the user's process group, has a store of torch at this address: also if there is
    # one worker only.
    of_agent = "MASTER_PORT" in env and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    taken = of_agent or (dist.is_available() and dist.is_initialized())
    store_host = Host.RANK_0_ANYWHERE if taken else Host.RANK_0
    if LAUNCHER_STORE in env:
        host, port = _launcher_store()
        store_host = Host.LAUNCHER
    return RankInfo(rank, workers, host, port, own_prefix(run), run, find_secret(), store_host, tls or find_tls_files())


def own_prefix(run: str) -> str:
    """Return the prefix of the keys of the next join of this process, in the run of that name."""
    return f"gossamer/{run}/{next(_num_joins)}/"


def run_name() -> str:
    """Return the name of the run that this process is part of."""
    env = os.environ
    return f"{env.get('TORCHELASTIC_RUN_ID', 'run')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def started_rank_info() -> RankInfo | None:
    """Return the rank info if torchrun, SLURM or another launcher started this process, else None."""
    env = os.environ
    if {"RANK", "WORLD_SIZE"} <= env.keys() or env.get("SLURM_NTASKS", "1") != "1":
        return find_rank_info()
    return None


def _launcher_store() -> tuple[str, int]:
    host, _, port = os.environ[LAUNCHER_STORE].rpartition(":")
    if not host or not port.isdecimal():
        given = os.environ[LAUNCHER_STORE]
        raise InputError(f"{LAUNCHER_STORE} is {given!r}: expected HOST:PORT, as gossamer launch sets it; unset it")
    return host, int(port)


def _env_int(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise InputError(f"{name} is {os.environ[name]!r} in the environment: expected a whole number") from None


_port_locks: deque[int] = deque()
"""File descriptors of the abstract sockets that lock the most recent ports."""

_MAX_PORT_LOCKS = 64


def free_port() -> int:
    """Return a port that nobody listens on and that this function gives to no other process for a while.

    The port is outside the range from which the kernel picks ports for outgoing connections: one of those could be
    taken again before we listen on it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 16_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if sys.platform == "linux":
                _lock_port(port)
            return port


def _lock_port(port: int) -> None:
    """Lock ``port`` by binding an abstract Unix socket until this process ends; OSError if another process has it.

    Systems that forbid abstract sockets go without the lock.
    """
    with contextlib.suppress(PermissionError), socket.socket(socket.AF_UNIX) as lock:
        lock.bind(f"\0gossamer port {port}")
        _port_locks.append(lock.detach())
    if len(_port_locks) > _MAX_PORT_LOCKS:
        os.close(_port_locks.popleft())
