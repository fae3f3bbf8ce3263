"""A worker that comes to a run in progress: it asks, and is given the next free rank."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from gossamer.errors import InputError
from gossamer.process.net.connection import Address
from gossamer.process.net.greeting import Reason, Refused
from gossamer.process.net.identity import Identity
from gossamer.process.net.secret import find_secret
from gossamer.process.net.tls import TlsFiles, find_tls_files, make_tls
from gossamer.process.roster.roster import read_roster
from gossamer.process.roster.roster_store import KEY, take_rank
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.home_store import Home, Host
from gossamer.process.store.introduction import Introduction, ask
from gossamer.process.store.rank_info import RankInfo

ASK_TIMEOUT_S = 10.0
"""How long what listens there may take to answer."""

CONNECT_TIMEOUT_S, STORE_TIMEOUT_S = 30.0, 3.0
"""How long to look for the store in use, and to wait for one of its hosts."""

RETRY_S, WAIT_S = 0.2, 1.0

OF_REPLICAS = "replicas"
"""What a run announces to whose replicas no others can come."""


class Newcomer:
    """This process on its way into the run at ``at``, HOST:PORT of the store or of any worker."""

    def __init__(self, at: str, tls: TlsFiles | None, timeout_s: float, *, prefix: Callable[[str], str]) -> None:
        """Return once the run has begun. ``prefix(run)``: of the keys of that run, empty if the run says it itself.

        InputError if there is no run within ``timeout_s``, or the secret is wrong.
        """
        self._at, self._tls, self._until = at, tls or find_tls_files(), time.monotonic() + timeout_s
        self._secret = find_secret()
        self._address = parse_address(at, "a run cannot be joined at")
        self._be_introduced()
        self.job = ""
        """What the run announces about itself, if it is one of ``gossamer train``."""
        self._prefix = prefix(self._run) or self._announced()
        self._store = self._connect(self._prefix)
        try:
            self._wait_until_begun()
            roster = read_roster(self._store.get(KEY))
        except BaseException:
            self._store.close()
            raise
        if roster is None:
            self._store.close()
            raise InputError(f"the run at {at} has no list of its workers: install the same version of gossamer")
        self.workers = roster.first
        """The number of workers with which the run began: what its facts are about."""
        self._roster = roster

    def take_rank(self) -> RankInfo:
        """Return the next free rank: no other process is given it."""
        try:
            rank = take_rank(self._store, self._roster)
        finally:
            self.close()
        if rank is None:
            raise InputError(f"the store of the run at {self._at} does not answer any more: try again")
        return RankInfo(
            rank,
            self.workers,
            *self._home,
            self._prefix,
            self._run,
            self._secret,
            Host.LAUNCHER,
            self._tls,
            self._roster.came | {rank},
            self._reached_at,
        )

    def close(self) -> None:
        self._store.close()

    def _be_introduced(self) -> None:
        introduction = self._ask(self._address)
        self._run, self._home, self._reached_at = introduction.run, introduction.home, introduction.store

    def _ask(self, address: Address) -> Introduction:
        tls = None if self._tls is None else make_tls(self._tls)
        until = min(self._until, time.monotonic() + ASK_TIMEOUT_S)
        while True:
            try:
                return ask(address, self._secret, tls, ASK_TIMEOUT_S)
            except OSError as error:
                # A process that is being killed cuts the greeting off.
                if isinstance(error, Refused) and error.reason != Reason.CUT_OFF:
                    why = str(error)
                    if error.reason == Reason.WRONG_PROOF:
                        why = "it has another secret: give this worker the GOSSAMER_SECRET of the run"
                    raise InputError(f"the run at {self._at} does not let this worker in: {why}") from None
                if time.monotonic() > until:
                    raise InputError(
                        f"no run answers at {self._at} ({error.strerror or error or 'no answer'}): give the HOST:PORT "
                        "of its store, or of any of its workers"
                    ) from None
            time.sleep(RETRY_S)

    def _connect(self, prefix: str) -> FailoverStore:
        tls = None if self._tls is None else make_tls(self._tls)
        identity = Identity(None, self._run, self._secret, tls=tls)
        until = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            home = Home(*self._home, Host.LAUNCHER, "")
            try:
                return FailoverStore(home, identity, prefix, STORE_TIMEOUT_S, reached_at=self._reached_at)
            except InputError:
                if time.monotonic() > until:
                    raise
            # The host of the store may have died, and the others move to another one.
            self._be_introduced()

    def _announced(self) -> str:
        """Return the prefix that the run announces; wait until it does."""
        store = self._connect("")
        try:
            while (text := store.announced()) is None:
                self._check_time("has not begun")
                time.sleep(RETRY_S)
        finally:
            store.close()
        self._check_announced(text)
        try:
            announced = json.loads(text)
            self.job = str(announced["job"])
            return str(announced["prefix"])
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"what the run at {self._at} says about its job cannot be read: install the same version of gossamer"
            ) from None

    def _check_announced(self, text: bytes | None) -> None:
        """InputError if the run has announced that nobody can come to it."""
        if text is not None and text == OF_REPLICAS.encode():
            raise InputError(
                f"the run at {self._at} takes no more workers: its workers are replicas of several ranks, and none can "
                "come to those; start a run with more of them"
            )

    def _wait_until_begun(self) -> None:
        while not self._store.has_all(["started"], WAIT_S):
            self._check_announced(self._store.announced())
            self._check_time("has not begun")

    def _check_time(self, what: str) -> None:
        if time.monotonic() > self._until:
            raise InputError(f"the run at {self._at} {what}: look at the output of its workers")


def announcement(prefix: str, job: str, of_replicas: bool = False) -> str:
    """Return what a run says to processes that want to come to it; empty: nothing. ``job``: of ``gossamer train``."""
    if of_replicas:
        return OF_REPLICAS
    return json.dumps({"prefix": prefix, "job": job}) if job else ""


def parse_address(text: str, what: str) -> Address:
    """Return the host and the port that a user gives; ``what`` begins the error if they are none."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{what} {text!r}: expected HOST:PORT, such as 10.0.0.1:29500")
    return host, int(port)
