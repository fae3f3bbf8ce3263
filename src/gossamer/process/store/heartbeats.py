"""Heartbeats: every worker increments a counter in the store; a counter that stops means that its worker is dead.

With the counter a worker publishes how far it is; beside it, whether it is done with its training.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

from gossamer.process.store.failover_store import FailoverStore

HEARTBEAT_INTERVAL_S = 0.1
WATCHES_PER_HEARTBEAT = 4
"""How often a worker that misses others looks for them."""

SUSPECT_S = 0.5
"""A worker whose counter has stood still for this long is dead if nothing listens on the port of its store."""

DEAD_S = 3.0
"""After this long it is dead if its store does not answer. The store needs no Python, so a busy process still answers
and a stopped one (SIGSTOP) does not. A worker that moves again is alive again."""

HUNG_S = 60.0
"""After this long it is dead whatever answers."""

FIRST_HEARTBEAT_S = 300.0
"""How long a worker that was never seen may still be starting."""


NOT_DONE, DONE, LEFT = b"0", b"1", b"2"
"""What a worker publishes about its end. Done: it trains no more. Left: it has the final average and closes."""


class Progress(NamedTuple):
    """How far a worker is."""

    steps: int
    busy_s: float
    """Time of these steps without waits for other workers."""


class Heartbeats:
    """The heartbeats of all workers, as seen by one of them."""

    def __init__(self, rank: int, store: FailoverStore) -> None:
        self.rank, self.store = rank, store
        self._count = 0
        self._process = uuid.uuid4().hex[:8]
        """Tells a worker that was started again from the one before."""
        self.all_seen = False
        """Every worker has been seen: one without a counter is dead, not starting."""
        self._last_seen: dict[int, tuple[bytes | None, float]] = {}
        self.lost: set[int] = set()
        """Workers that were dead at the last check."""
        self.own_progress: Callable[[], Progress] = lambda: Progress(0, 0.0)
        self.progress: dict[int, Progress] = {}
        """What each other worker published last."""
        self._processes: dict[int, set[str]] = {}
        self._left = False
        self._lock = threading.Lock()
        self.on_death: Callable[[int], None] = lambda rank: None
        """Called once when a worker is dead, in the thread that notices."""
        self.on_return: Callable[[int], None] = lambda rank: None
        """Called once when a dead worker is there again, or a new process in its place."""

    def beat(self) -> None:
        self._count += 1
        steps, busy_s = self.own_progress()
        text = f"{time.time():.3f}/{self._count}/{self._process}/{steps}/{busy_s:.3f}"
        self.store.set(f"beat/{self.rank}", text)

    def publish_done(self, done: bool) -> None:
        self.store.set(f"done/{self.rank}", (LEFT if self._left else DONE if done else NOT_DONE).decode())

    def publish_left(self) -> None:
        """Publish that this worker leaves in order: others shall not take it for dead."""
        self._left = True
        self.publish_done(True)

    def done(self, rank: int) -> bool:
        return self.store.get(f"done/{rank}") in (DONE, LEFT)

    def left(self, rank: int) -> bool:
        return self.store.get(f"done/{rank}") == LEFT

    def dead(self, rank: int) -> bool:
        """Check the counter of ``rank`` and return whether that worker is dead."""
        if rank == self.rank:
            return False
        counter, now = self.store.get(f"beat/{rank}"), time.monotonic()
        last = self._last_seen.get(rank)
        # A new store to which a worker has not written yet is no news about that worker.
        if last is None or (counter is not None and last[0] != counter):
            restarted = self._read(rank, counter)
            with self._lock:
                self._last_seen[rank] = (counter, now)
                returned = rank in self.lost or restarted
                self.lost.discard(rank)
            if returned:
                self.on_return(rank)
            return False
        if rank not in self.lost and self._is_dead(rank, last[0] is not None, now - last[1]):
            with self._lock:
                # Another thread may have seen it move meanwhile, or have been first.
                died = rank not in self.lost and self._last_seen[rank] is last
                if died:
                    self.lost.add(rank)
            if died:
                self.on_death(rank)
        return rank in self.lost

    def seen(self, rank: int) -> bool:
        """Return whether a heartbeat of ``rank`` has ever been seen here."""
        return self._last_seen.get(rank, (None, 0.0))[0] is not None

    def _read(self, rank: int, counter: bytes | None) -> bool:
        """Note how far ``rank`` is; return whether another process was in its place before."""
        try:
            _, _, process, steps, busy_s = (counter or b"").decode().split("/")
            self.progress[rank] = Progress(int(steps), float(busy_s))
        except ValueError:
            return False
        known = self._processes.setdefault(rank, set())
        restarted = bool(known) and process not in known
        known.add(process)
        return restarted

    def _is_dead(self, rank: int, seen: bool, silent_s: float) -> bool:
        if not seen and not self.all_seen:
            return silent_s > FIRST_HEARTBEAT_S
        if silent_s < SUSPECT_S:
            return False
        if silent_s > HUNG_S or not self.store.listens(rank):
            return True
        return silent_s > DEAD_S and not self.store.answers(rank)


class HeartbeatThread:
    """A daemon thread that beats, and calls ``poll`` after every heartbeat and ``watch`` also between two of them."""

    def __init__(
        self,
        heartbeats: Heartbeats,
        poll: Callable[[], None] = lambda: None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.heartbeats, self._poll, self._watch = heartbeats, poll, watch
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gossamer-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            # A store or a connection that fails now is tried again at the next heartbeat.
            with contextlib.suppress(RuntimeError):
                self.heartbeats.beat()
                self._poll()
            for _ in range(WATCHES_PER_HEARTBEAT):
                if self._closed.wait(HEARTBEAT_INTERVAL_S / WATCHES_PER_HEARTBEAT):
                    break
                with contextlib.suppress(RuntimeError):
                    self._watch()

    def close(self, timeout_s: float = 2 * HEARTBEAT_INTERVAL_S + 1) -> None:
        """Stop after the heartbeat in progress; wait for it at most ``timeout_s``."""
        self._closed.set()
        self._thread.join(timeout_s)
