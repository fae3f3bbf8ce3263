"""Passes what a real worker does to the recorder, in seconds since the run began. Does nothing without a recorder."""

from __future__ import annotations

import time

from gossamer.process.store.failover_store import FailoverStore
from gossamer.recording import Recorder


class StepRecorder:
    """Converts times of this process's clock to seconds since the run began, which are the same for all workers."""

    def __init__(self, rank: int, recorder: Recorder | None) -> None:
        self.rank, self.recorder = rank, recorder
        self.began = time.monotonic()
        """When the run began, on this process's clock."""
        self._last_step_at = self.began
        self._gradient_at = self.began

    def agree_on_start(self, store: FailoverStore) -> None:
        """Agree with the other workers on when the run began: the first one to publish its time decides.

        A resumed run began as long ago as it has lasted.
        """
        if self.recorder is None:
            return
        own = time.time() - self.recorder.resumed_after_s
        agreed = store.compare_set("began", repr(own))
        self.began = time.monotonic() - (time.time() - (float(agreed) if agreed else own))
        self._last_step_at = time.monotonic()

    @property
    def began_ns(self) -> int:
        """When the run began, in nanoseconds since 1970."""
        return time.time_ns() - round((time.monotonic() - self.began) * 1e9)

    def now(self) -> float:
        return time.monotonic() - self.began

    def enter_step(self) -> None:
        """The gradient has been computed."""
        self._gradient_at = time.monotonic()

    def leave_step(self, void: bool) -> None:
        """The step has ended; a void one does not count."""
        ended = time.monotonic()
        if self.recorder is not None and not void:
            times = (moment - self.began for moment in (self._last_step_at, self._gradient_at, ended))
            self.recorder.stepped(self.rank, *times)
        self._last_step_at = ended

    def waited(self, since: float) -> None:
        """Training has waited for other workers since then."""
        if self.recorder is not None:
            self.recorder.waited(self.rank, since - self.began, self.now())

    def snapshot(self, since: float) -> None:
        """A snapshot was copied."""
        if self.recorder is not None:
            self.recorder.snapshot(self.rank, since - self.began, self.now())

    def exchanged(self, members: tuple[int, ...], since: float, sent_bytes: int, name: str) -> None:
        """An exchange or a collective has ended that all its members call ``name``."""
        if self.recorder is not None:
            self.recorder.exchanged(members, since - self.began, self.now(), sent_bytes, name)

    def merged(self, since: float, staleness: int) -> None:
        """An answer was merged, ``staleness`` steps after this worker had sent its part."""
        if self.recorder is not None:
            self.recorder.merged(self.rank, since - self.began, self.now(), staleness)
