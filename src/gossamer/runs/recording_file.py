"""The recording of one worker as a file in the run folder, and its trace."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from gossamer.recording import Recorder
from gossamer.recording.trace import TraceFile
from gossamer.runs.run_folder import RANKS, RECORDING, TRACE, WORKERS, WriteThrottle, write_text


class RecordingFile:
    """The recording of one worker, and its trace. A worker that was restarted writes a second file of each."""

    def __init__(self, folder: Path, rank: int, trace: bool, recorder: Recorder | None = None, shard: int = 0) -> None:
        """``recorder``: that of a worker that has joined already. ``shard``: which rank of its replica it is."""
        self.rank = rank
        where, of = (folder / WORKERS / RANKS, f"{rank}-{shard}") if shard else (folder / WORKERS, f"{rank}")
        earlier = sorted(where.glob(f"{of}.*{RECORDING}"))
        name = f"{of}.{len(earlier)}." if earlier else f"{of}."
        self.path = where / (name + RECORDING)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._died_at_s = max(map(_recorded_until, earlier), default=None)
        self._trace = None
        if trace and not shard:
            path = folder / WORKERS / (name + TRACE)
            self._trace = TraceFile(path, [rank], began_ns=time.time_ns(), title=f"worker {rank}")
        if recorder is None:
            recorder = Recorder([rank])
            recorder.resumed_after_s = recorded_until(folder)
        else:
            recorder.flush()
        self.recorder = recorder
        recorder.sink = self._trace
        self._throttle = WriteThrottle()

    def begin(self) -> None:
        origin, now = self.recorder.origin, time.monotonic()
        if self._trace is not None:
            self._trace.start_at(time.time_ns() - round((now - origin) * 1e9))
        if self._died_at_s is not None:
            self.recorder.left(self.rank, origin + self._died_at_s)
            self.recorder.joined(self.rank, now)

    def write(self, is_last: bool = False, ended: bool = False) -> None:
        """Rewrite the file if that is due, and the last time; ``ended``: the worker has come to the end of the run."""
        if not is_last and not self._throttle.due:
            return
        with self._throttle:
            document = {**self.recorder.document(time.monotonic()), "ended": ended}
            write_text(self.path, json.dumps(document) + "\n")
        if is_last:
            self.close()

    def close(self) -> None:
        """Stop writing the trace; the recorder goes on without it."""
        self.recorder.sink = None
        if self._trace is not None:
            with contextlib.suppress(OSError):
                self._trace.close()


def recorded_until(folder: Path) -> float:
    """Return how long the run in ``folder`` has lasted, as far as its recordings say; 0 if there are none."""
    return max(map(_recorded_until, (folder / WORKERS).glob(f"*{RECORDING}")), default=0.0)


def _recorded_until(path: Path) -> float:
    """Return when a recording ends; 0 if it cannot be read."""
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["until"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
