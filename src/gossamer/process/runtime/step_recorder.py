"""What a worker notes down about itself, for the recorder: nothing, if there is none."""

from __future__ import annotations

import time

from gossamer.process.store.failover_store import FailoverStore
from gossamer.recording import Recorder


class StepRecorder:
    """Turns moments of this process into times since the run began, which are the same for all workers."""

    def __init__(self, rank: int, recorder: Recorder | None) -> None:
        self.rank, self.recorder = rank, recorder
        self.began = time.monotonic()
        """When the run began, on this process's clock."""
        self._stepped_at = self.began
        self._in_step_since = self.began

    def agree(self, store: FailoverStore) -> None:
        """Agree with the others on when the run began: when the first of them says so, or, where the run is resumed, as
        long before as it has lasted already."""
        if self.recorder is None:
            return
        own = time.time() - self.recorder.resumed_after_s
        known = store.claim("began", repr(own))
        self.began = time.monotonic() - (time.time() - (float(known) if known else own))
        self._stepped_at = time.monotonic()

    @property
    def began_ns(self) -> int:
        """When the run began, in nanoseconds since 1970."""
        return time.time_ns() - round((time.monotonic() - self.began) * 1e9)

    def now(self) -> float:
        return time.monotonic() - self.began

    def enter_step(self) -> None:
        """The gradient is there."""
        self._in_step_since = time.monotonic()

    def leave_step(self, void: bool) -> None:
        """The step is made; or does not count."""
        ended = time.monotonic()
        if self.recorder is not None and not void:
            times = (moment - self.began for moment in (self._stepped_at, self._in_step_since, ended))
            self.recorder.stepped(self.rank, *times)
        self._stepped_at = ended

    def waited(self, since: float) -> None:
        """The training waited for others, since this moment."""
        if self.recorder is not None:
            self.recorder.waited(self.rank, since - self.began, self.now())

    def snapshot(self, since: float) -> None:
        """What is to travel was copied."""
        if self.recorder is not None:
            self.recorder.snapshot(self.rank, since - self.began, self.now())

    def exchanged(self, members: tuple[int, ...], since: float, sent_bytes: int, name: str) -> None:
        """An exchange that all members know by ``name``."""
        if self.recorder is not None:
            self.recorder.exchanged(members, since - self.began, self.now(), sent_bytes, name)

    def merged(self, since: float, staleness: int) -> None:
        """An answer was merged, ``staleness`` steps after this worker had sent its part."""
        if self.recorder is not None:
            self.recorder.merged(self.rank, since - self.began, self.now(), staleness)
