"""What happens to a worker while it trains, as records that programs can filter and lines that people can read.

Each event is also logged, by the standard library's logger ``gossamer``. As in other libraries, the logger has no
handler of its own: ``logging.basicConfig(level=logging.INFO)`` shows the lines.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from enum import StrEnum

logger = logging.getLogger("gossamer")


class EventKind(StrEnum):
    """What happened. The values are stable: programs may compare them."""

    DIED = "died"
    """A worker is dead or out of reach, or has left without ``finish``."""
    FAILED = "failed"
    """A worker has left since an exception ended its program; the line names it."""
    RETURNED = "returned"
    """A worker that was dead is there again, or a new process in its place."""
    CUT = "cut"
    """Two workers cannot reach each other, though others reach both: no average has both of them until they can."""
    ALONE = "alone"
    """No other worker is there any more."""
    SLOW = "slow"
    """A worker takes more than twice as long for a step as the median worker, waits for others not counted."""
    RECOVERED = "recovered"
    """A slow worker is not slow any more."""
    FEW_EXCHANGES = "few-exchanges"
    """Fewer than half of the pairwise exchanges that the method asks for take place."""
    CAME = "came"
    """A worker has come to the run that was not there at its beginning."""
    LEFT = "left"
    """A worker has left for good, or the others have given up its place."""
    RESIZED = "resized"
    """The run goes on with another number of workers: topology and constants follow."""
    REBUILT = "rebuilt"
    """The members of collectives were agreed on anew."""
    MERGED = "merged"
    """Workers that trained separately, on two sides of a partition, were averaged."""
    DISCARDED = "discarded"
    """The steps of some workers are lost: their models had nothing in common with those of the others."""
    PAUSED = "paused"
    """This worker cannot reach more than half of the workers, and the policy is to wait for them."""
    RESUMED = "resumed"
    """This worker trains again after a pause."""
    MISSING = "missing"
    """The final average is without some of the workers: they died or cannot be reached."""
    TOOK_OVER = "took-over"
    """This worker took over the state of another."""
    REFUSED = "refused"
    """A message was not finite or absurdly large, or a stranger asked to come in: it had no effect."""
    UNPROTECTED = "unprotected"
    """Workers listen at an address that others may reach, and there is no secret that keeps strangers out."""
    NOT_AVERAGED = "not-averaged"
    """A mean that was asked for was not taken over all workers, or this worker's weights did not count in it."""
    WAITING = "waiting"
    """``join``, ``finish`` or a mean has been waiting for some seconds: for other workers, or for the store."""
    UNSEEN = "unseen"
    """Weights were changed by something else than ``step()`` of the optimizer given to ``join``."""
    NO_GRADIENT = "no-gradient"
    """Several steps in a row had no gradient at all."""
    UNFINISHED = "unfinished"
    """The process ends without ``finish()``."""
    DEALT = "dealt"
    """The data of an epoch is dealt among other workers than that of the epoch before."""
    NOT_DEALT = "not-dealt"
    """Data was taken as it comes: it is dealt among the workers only if the user has done so."""
    NOT_WRITTEN = "not-written"
    """The run folder or the tracker failed: something is missing there. Training goes on."""
    CHOSEN = "chosen"
    """``method="auto"`` has chosen a method."""


_LEVELS = {
    EventKind.RETURNED: logging.INFO,
    EventKind.RECOVERED: logging.INFO,
    EventKind.CAME: logging.INFO,
    EventKind.LEFT: logging.INFO,
    EventKind.RESIZED: logging.INFO,
    EventKind.REBUILT: logging.INFO,
    EventKind.RESUMED: logging.INFO,
    EventKind.TOOK_OVER: logging.INFO,
    EventKind.DEALT: logging.INFO,
    EventKind.CHOSEN: logging.INFO,
}
"""Kinds that are no warning."""


@dataclass(frozen=True)
class Event:
    """One thing that happened. ``str(event)`` is its line for people."""

    kind: EventKind
    text: str
    rank: int
    """The worker that it is about."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    def __str__(self) -> str:
        return self.text


class Events(list[Event]):
    """The events of one worker, oldest first. Any thread may add one."""

    def __init__(self, rank: int) -> None:
        """``rank``: this worker's."""
        super().__init__()
        self.rank = rank

    def add(self, kind: EventKind, text: str, rank: int | None = None) -> None:
        """Add an event about worker ``rank``, by default this one, and log it."""
        self.append(Event(kind, text, self.rank if rank is None else rank))
        logger.log(_LEVELS.get(kind, logging.WARNING), "worker %d: %s", self.rank, text)
