"""What a real worker leaves in the run folder about what it did: its recording, and its trace if one is wanted."""

from __future__ import annotations

import json
import time
from pathlib import Path

from gossamer.errors import InputError
from gossamer.recording import Recorder
from gossamer.recording.trace import TraceFile
from gossamer.runfolder import RECORDING, TRACE, WORKERS, WriteThrottle, write_text


class WorkerRecording:
    """The files of one worker. One that was started again has a second set: the first says what was before."""

    def __init__(self, folder: Path, rank: int, trace: bool) -> None:
        self.rank = rank
        before = sorted((folder / WORKERS).glob(f"{rank}.*{RECORDING}"))
        name = f"{rank}.{len(before)}." if before else f"{rank}."
        self.path = folder / WORKERS / (name + RECORDING)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._last_seen_s = max(map(_until, before), default=None)
        earlier = [_until(path) for path in (folder / WORKERS).glob(f"*{RECORDING}")]
        self._trace = None
        if trace:
            path = folder / WORKERS / (name + TRACE)
            self._trace = TraceFile(path, [rank], began_ns=time.time_ns(), title=f"worker {rank}")
        self.recorder = Recorder([rank], self._trace)
        self.recorder.resumed_after_s = max(earlier, default=0.0)
        self._sparingly = WriteThrottle()

    def began(self, began_ns: int, now_s: float) -> None:
        """The worker has joined the others, ``now_s`` after the run began."""
        if self._trace is not None:
            self._trace.start_at(began_ns)
        if self._last_seen_s is not None:
            self.recorder.left(self.rank, self._last_seen_s)
            self.recorder.joined(self.rank, now_s)

    def write(self, now_s: float, ended: bool = False) -> None:
        """Renew the file, now and then, and in the end."""
        if not ended and not self._sparingly.due:
            return
        with self._sparingly:
            document = {**self.recorder.document(now_s), "ended": ended}
            write_text(self.path, json.dumps(document) + "\n")
        if ended and self._trace is not None:
            self._trace.close()


def _until(path: Path) -> float:
    """When a recording ends; 0 if it cannot be read."""
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["until"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def open_recording(folder: Path | None, rank: int, trace: bool) -> WorkerRecording | None:
    """A worker's recording, where it can be kept: a folder that cannot be written to is no reason not to train."""
    if folder is None:
        return None
    try:
        return WorkerRecording(folder, rank, trace)
    except (OSError, InputError):
        return None
