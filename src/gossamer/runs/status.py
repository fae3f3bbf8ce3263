"""What a worker publishes about itself while it trains, and the board in the store where it does."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from gossamer.process.roster.roster import Roster
from gossamer.process.roster.roster_store import read_from
from gossamer.process.store.failover_store import FailoverStore
from gossamer.process.store.parsing import read_json, read_number
from gossamer.results import to_json_data

STARTING, TRAINING, DONE, FAILED, LEFT = "starting", "training", "done", "failed", "left"


@dataclass
class WorkerStatus:
    """How far one worker is. Counts include those before a restart or before the run was resumed."""

    rank: int
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    state: str = STARTING
    steps: int = 0
    resumed_at: int = 0
    """The steps of this worker when the run was resumed from a checkpoint."""
    seconds: float = 0.0
    """From its first step to its last."""
    idle_s: float = 0.0
    """Of those, spent waiting for others."""
    step_s: float = 0.0
    """Mean time of its newest steps, without the first quarter of a short run."""
    loss_sum: float = 0.0
    """Over all mini-batches with a finite loss."""
    loss_count: int = 0
    exchanges: int = 0
    bytes_sent: int = 0
    consensus: float = 0.0
    """Distance to the peer of the newest exchange; at the end, to the averaged model."""
    peers_alive: int = 0
    lost: int = 0
    refused: int = 0
    own_loss: float | None = None
    """Of its own model on the test set at the last evaluation; at the end, before the final average."""
    own_accuracy: float | None = None
    loss: float | None = None
    """Of the averaged model on the test set: at the end, or when its loop logged it last."""
    accuracy: float | None = None
    num_evaluations: int = 0
    """How often its loop has logged figures of the averaged model."""
    logged: dict[str, float | None] = field(default_factory=dict)
    """The newest value of everything else that its loop has logged, by name."""
    diverged_at: int | None = None
    """The step at which its loss stopped being finite."""
    interrupted: bool = False
    missing: list[int] = field(default_factory=list)
    """Workers that are not in the final average."""
    error: str = ""
    """What went wrong in it, in one line."""
    events: list[str] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """If the worker is a replica: its ranks, as ``rank_figures`` gives them."""

    def to_json(self) -> str:
        # Not asdict, which copies every value deeply: this runs several times a second.
        return json.dumps(to_json_data(vars(self)))

    @property
    def mean_loss(self) -> float | None:
        return self.loss_sum / self.loss_count if self.loss_count else None

    def loss_since(self, earlier: WorkerStatus) -> float | None:
        """Return the mean loss of the mini-batches since an earlier status."""
        gained = self.loss_count - earlier.loss_count
        if gained < 0:
            # The worker was restarted and counts anew.
            return self.mean_loss
        return (self.loss_sum - earlier.loss_sum) / gained if gained else None


class StatusBoard:
    """Where the workers of one run publish their status, and where the monitor asks them for things."""

    def __init__(self, store: FailoverStore) -> None:
        self._store = store

    def put(self, status: WorkerStatus, timeout_s: float = 0.0) -> None:
        """Publish a status; retry for ``timeout_s`` if the store cannot be reached."""
        until = time.monotonic() + timeout_s
        while not self._store.set(f"status/{status.rank}", status.to_json()) and time.monotonic() < until:
            time.sleep(0.1)

    def get(self, rank: int) -> WorkerStatus | None:
        """Return the newest status of a worker; None if there is none or the store cannot be reached."""
        try:
            status = WorkerStatus(**read_json(self._store.get(f"status/{rank}")))
        except TypeError:
            return None
        return status if status.rank == rank else None

    def roster(self) -> Roster | None:
        """Return who belongs to the run; None if that is not known yet."""
        return read_from(self._store)

    def request_stop(self) -> None:
        self._store.set("stop", "1")

    def stop_requested(self) -> bool:
        return self._store.get("stop") is not None

    def publish_leaving(self, rank: int) -> None:
        """Publish that worker ``rank`` was told to leave for good."""
        self._store.set(f"leaving/{rank}", "1")

    def is_leaving(self, rank: int) -> bool:
        return self._store.get(f"leaving/{rank}") is not None

    def publish_last_step(self, rank: int, step: int) -> None:
        """Publish the last step that worker ``rank``, asked to stop, has begun on its own."""
        self._store.set(f"stop/{rank}", str(step))

    def last_step(self, rank: int) -> int | None:
        return read_number(self._store.get(f"stop/{rank}"))

    def agree(self, key: str, value: int) -> int:
        """Return the first value that any worker proposed for ``key``; our own if the store cannot be reached."""
        agreed = read_number(self._store.compare_set(key, str(value)))
        return value if agreed is None else agreed

    def request_checkpoint(self, total_steps: int) -> None:
        """Ask all workers for a checkpoint, named for the steps that they have made together."""
        self._store.set("checkpoint", str(total_steps))

    def requested_checkpoint(self) -> int:
        return read_number(self._store.get("checkpoint")) or 0

    def close(self) -> None:
        self._store.close()
