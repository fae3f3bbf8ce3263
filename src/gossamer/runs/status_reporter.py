"""The status thread of a worker: publishes its status, writes its metrics and its recording, reads requests.

Files that cannot be written are reported as events; training goes on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from gossamer.errors import InputError
from gossamer.process.events import Event
from gossamer.results import to_json_data
from gossamer.runs.recording_file import RecordingFile
from gossamer.runs.run_folder import WORKERS
from gossamer.runs.status import StatusBoard, WorkerStatus

PUBLISH_S = 0.2
STOPPING_S = 0.02
"""How often a worker that is asked to stop publishes its status."""

LINE_S = 1.0
"""Minimum time between two lines of a worker's metrics; long runs write them further apart."""

RETRY_S = 2.0
"""How long a worker tries to publish its first and its last status."""


class StatusReporter:
    def __init__(
        self,
        board: StatusBoard,
        folder: Path | None,
        recording: RecordingFile | None,
        status: WorkerStatus,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """``say``: called with events of this reporter; by default they only go into the status."""
        self.board, self.folder, self.recording, self.status = board, folder, recording, status
        self.events: list[str] = []
        """Events of this reporter and of checkpoints."""
        self._say = self.events.append if say is None else say
        self._said: set[str] = set()
        self._swarm_events: Sequence[Event] = ()
        self._next_line_s = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self,
        update: Callable[[], None],
        stopping: threading.Event,
        swarm_events: Sequence[Event],
        at_end: Callable[[], None] = lambda: None,
        publish_s: float = PUBLISH_S,
    ) -> None:
        """Start the thread. ``update()`` brings the status up to date before each publication; ``at_end()`` is last."""
        self._swarm_events = swarm_events

        def run() -> None:
            while not self._ended.wait(STOPPING_S if stopping.is_set() else publish_s):
                update()
                self._publish()
                if self.status.seconds >= self._next_line_s:
                    self._next_line_s = self.status.seconds + max(LINE_S, self.status.seconds / 200)
                    self._write_line()
                self._write_recording()
            at_end()

        self._thread = threading.Thread(target=run, name="gossamer-status", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: what it would publish now must not replace the last status."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def publish_first(self) -> None:
        """Publish the status at once: a worker that dies in its first step has begun all the same."""
        self._publish(RETRY_S)

    def publish_last(self, ended: bool = True) -> None:
        """Write and publish the last status; ``ended``: the worker has come to the end of the run."""
        self._write_line()
        self._write_recording(is_last=True, ended=ended)
        self._publish(RETRY_S)

    def _publish(self, timeout_s: float = 0.0) -> None:
        self.status.events = [*map(str, self._swarm_events), *self.events]
        self.board.put(self.status, timeout_s)

    def _write_line(self) -> None:
        if self.folder is None:
            return
        line = {name: value for name, value in vars(self.status).items() if name != "events"}
        path = self.folder / WORKERS / f"{self.status.rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(to_json_data(line)) + "\n")
        except OSError as error:
            self.say_once(f"{path} cannot be written to: {error.strerror}; training goes on")

    def _write_recording(self, is_last: bool = False, ended: bool = False) -> None:
        if self.recording is None:
            return
        try:
            self.recording.write(is_last, ended)
        except (OSError, InputError) as error:
            self.recording.close()
            self.recording = None
            self.say_once(f"{error}; training goes on")

    def say_once(self, event: str) -> None:
        if event not in self._said:
            self._said.add(event)
            self._say(event)
