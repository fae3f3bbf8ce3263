"""What a worker says about itself while it trains, and the status_board at the meeting point where it says it."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass, field

from gossamer.process.store.failover_store import FailoverStore
from gossamer.results import to_json_data

STARTING, TRAINING, DONE, FAILED = "starting", "training", "done", "failed"


@dataclass
class WorkerStatus:
    """How one worker fares."""

    rank: int
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    state: str = STARTING
    steps: int = 0
    """Made by this worker, before it was restarted or the run resumed too."""
    seconds: float = 0.0
    """Since its first step, up to its last."""
    idle_s: float = 0.0
    """Of those, spent waiting for others."""
    step_s: float = 0.0
    """Seconds from one of its newest steps to the next, on average, without the first quarter of a short run."""
    loss_sum: float = 0.0
    """Over all its mini-batches whose loss was finite."""
    loss_count: int = 0
    exchanges: int = 0
    bytes_sent: int = 0
    consensus: float = 0.0
    """How far it was from the last peer it met; in the end, from the averaged model."""
    peers_alive: int = 0
    lost: int = 0
    """Connections that broke."""
    refused: int = 0
    """Messages that were not finite or absurdly large."""
    own_loss: float | None = None
    """Of its own model on the test set, when that was last looked at; in the end, before the last average."""
    own_accuracy: float | None = None
    loss: float | None = None
    """Of the averaged model on the test set, in the end."""
    accuracy: float | None = None
    diverged_at: int | None = None
    """The step at which its loss was not finite and did not recover."""
    interrupted: bool = False
    error: str = ""
    """One line about what went wrong in it."""
    events: list[str] = field(default_factory=list)

    def text(self) -> str:
        return json.dumps(to_json_data(dataclasses.asdict(self)))

    @property
    def mean_loss(self) -> float | None:
        return self.loss_sum / self.loss_count if self.loss_count else None

    def loss_since(self, earlier: WorkerStatus) -> float | None:
        """The mean loss of the mini-batches since an earlier report."""
        gained = self.loss_count - earlier.loss_count
        if gained < 0:
            # It was restarted, and counts anew.
            return self.mean_loss
        return (self.loss_sum - earlier.loss_sum) / gained if gained else None


class StatusBoard:
    """Where the workers of one run leave their reports, and are asked for things by whoever watches them."""

    def __init__(self, point: FailoverStore) -> None:
        self._store = point

    def put(self, report: WorkerStatus, within_s: float = 0.0) -> None:
        """Leave a report; where the status_board is out of reach, again and again for so long."""
        until = time.monotonic() + within_s
        while not self._store.set(f"report/{report.rank}", report.text()) and time.monotonic() < until:
            time.sleep(0.1)

    def get(self, rank: int) -> WorkerStatus | None:
        """The newest report of a worker; None if there is none, or the status_board is out of reach."""
        found = self._store.get(f"report/{rank}")
        return None if found is None else WorkerStatus(**json.loads(found))

    def ask_to_stop(self) -> None:
        """Ask all workers to end where they are."""
        self._store.set("stop", "1")

    def asked_to_stop(self) -> bool:
        return self._store.get("stop") is not None

    def bound(self, rank: int, step: int) -> None:
        """Say that worker ``rank``, asked to stop, begins no further step than this on its own."""
        self._store.set(f"stop/{rank}", str(step))

    def bound_of(self, rank: int) -> int | None:
        found = self._store.get(f"stop/{rank}")
        return None if found is None else int(found)

    def agree(self, what: str, value: int) -> int:
        """The first value that any worker proposed for ``what``; our own where nobody can be asked."""
        held = self._store.claim(what, str(value))
        return value if held is None else int(held)

    def want_checkpoint(self, total_steps: int) -> None:
        """Ask all workers for a checkpoint, named for how many steps they have made together."""
        self._store.set("checkpoint", str(total_steps))

    def wanted_checkpoint(self) -> int:
        found = self._store.get("checkpoint")
        return 0 if found is None else int(found)

    def close(self) -> None:
        self._store.close()
