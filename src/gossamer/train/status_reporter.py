"""The status thread of a worker: publishes its status, writes its metrics and its recording, reads requests.

Files that cannot be written are reported as events; training goes on.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from gossamer.errors import InputError
from gossamer.process.events import Event
from gossamer.recording import Recorder
from gossamer.recording.trace import TraceFile
from gossamer.results import to_json_data
from gossamer.runfolder import RECORDING, TRACE, WORKERS, WriteThrottle, write_text
from gossamer.train.status import StatusBoard, WorkerStatus

PUBLISH_S = 0.2
STOPPING_S = 0.02
"""How often a worker that is asked to stop publishes its status."""

LINE_S = 1.0
"""Minimum time between two lines of a worker's metrics; long runs write them further apart."""


class StatusReporter:
    def __init__(self, board: StatusBoard, folder: Path | None, trace: bool, status: WorkerStatus) -> None:
        self.board, self.folder, self.status = board, folder, status
        self.events: list[str] = []
        """Events of this reporter and of checkpoints."""
        self._swarm_events: Sequence[Event] = ()
        self.recording = None
        if folder is not None:
            # Without a recording if the folder cannot be written to.
            with contextlib.suppress(OSError, InputError):
                self.recording = RecordingFile(folder, status.rank, trace)
        self._next_line_s = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, update: Callable[[], None], stopping: threading.Event, swarm_events: Sequence[Event]) -> None:
        """Start the thread. ``update()`` brings the status up to date before each publication."""
        self._swarm_events = swarm_events

        def run() -> None:
            while not self._ended.wait(STOPPING_S if stopping.is_set() else PUBLISH_S):
                update()
                self._publish()
                if self.status.seconds >= self._next_line_s:
                    self._next_line_s = self.status.seconds + max(LINE_S, self.status.seconds / 200)
                    self._write_line()
                self._write_recording()

        self._thread = threading.Thread(target=run, name="gossamer-status", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread: what it would publish now must not replace the last status."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def publish_last(self) -> None:
        self._write_line()
        self._write_recording(ended=True)
        self._publish()

    def _publish(self) -> None:
        self.status.events = [*map(str, self._swarm_events), *self.events]
        self.board.put(self.status)

    def _write_line(self) -> None:
        if self.folder is None:
            return
        line = {name: value for name, value in asdict(self.status).items() if name != "events"}
        path = self.folder / WORKERS / f"{self.status.rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(to_json_data(line)) + "\n")
        except OSError as error:
            self._add_event_once(f"{path} cannot be written to: {error.strerror}; training goes on")

    def _write_recording(self, ended: bool = False) -> None:
        if self.recording is None:
            return
        try:
            self.recording.write(ended)
        except (OSError, InputError) as error:
            self.recording = None
            self._add_event_once(f"{error}; training goes on")

    def _add_event_once(self, event: str) -> None:
        if event not in self.events:
            self.events.append(event)


class RecordingFile:
    """The recording of one worker, and its trace. A worker that was restarted writes a second file of each."""

    def __init__(self, folder: Path, rank: int, trace: bool) -> None:
        self.rank = rank
        earlier = sorted((folder / WORKERS).glob(f"{rank}.*{RECORDING}"))
        name = f"{rank}.{len(earlier)}." if earlier else f"{rank}."
        self.path = folder / WORKERS / (name + RECORDING)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._died_at_s = max(map(_recorded_until, earlier), default=None)
        others = [_recorded_until(path) for path in (folder / WORKERS).glob(f"*{RECORDING}")]
        self._trace = None
        if trace:
            path = folder / WORKERS / (name + TRACE)
            self._trace = TraceFile(path, [rank], began_ns=time.time_ns(), title=f"worker {rank}")
        self.recorder = Recorder([rank], self._trace)
        self.recorder.resumed_after_s = max(others, default=0.0)
        self._throttle = WriteThrottle()

    def begin(self) -> None:
        origin, now = self.recorder.origin, time.monotonic()
        if self._trace is not None:
            self._trace.start_at(time.time_ns() - round((now - origin) * 1e9))
        if self._died_at_s is not None:
            self.recorder.left(self.rank, origin + self._died_at_s)
            self.recorder.joined(self.rank, now)

    def write(self, ended: bool = False) -> None:
        """Rewrite the file if that is due, and at the end."""
        if not ended and not self._throttle.due:
            return
        with self._throttle:
            document = {**self.recorder.document(time.monotonic()), "ended": ended}
            write_text(self.path, json.dumps(document) + "\n")
        if ended and self._trace is not None:
            self._trace.close()


def _recorded_until(path: Path) -> float:
    """Return when a recording ends; 0 if it cannot be read."""
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["until"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
