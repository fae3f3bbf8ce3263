"""What a run leaves on disk.

::

    DIR/run.json             what made it: format of this folder, version, command, kind and unit of its times
    DIR/config.toml          every setting, to be given back with --config
    DIR/metrics.jsonl        one line per point of the history, written as the run goes
    DIR/recording.json       what the workers did and when, summed up (``recording.Recorder.document``); renewed as
                             the run goes
    DIR/trace.json           every single event, with --trace
    DIR/summary.json         the final figures; missing while the run goes on
    DIR/model.safetensors    the averaged model
    DIR/workers/N.recording.json   of real workers: what worker N did, instead of DIR/recording.json; N.1.recording.json
                             after it was started again
    DIR/workers/N.trace.json       of real workers: every single event of worker N, with --trace
    DIR/workers/N.jsonl      of real workers: what worker N said about itself, as the run goes
    DIR/workers/N.log        of real workers: what worker N printed, tracebacks included
    DIR/checkpoints/         of real workers: what a run can be resumed from

Files are written beside their place and then renamed, so that none is ever half there; metrics grow line by line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

import gossamer
from gossamer.errors import InputError
from gossamer.recording import Recorder

RUN, CONFIG, METRICS, SUMMARY, MODEL = "run.json", "config.toml", "metrics.jsonl", "summary.json", "model.safetensors"
RECORDING, TRACE = "recording.json", "trace.json"
WORKERS, CHECKPOINTS = "workers", "checkpoints"

FORMAT = 1
"""Goes up when older versions could not read a folder any more."""

SECONDS_BETWEEN_RECORDINGS = 1.0
RECORDING_SHARE = 0.005
"""Of the run's time that may be spent on writing recordings."""


class WriteThrottle:
    """Lets a recording be written now and then: the longer it takes, the more seldom."""

    def __init__(self) -> None:
        self._next = self._began = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        ended = time.monotonic()
        self._next = ended + max(SECONDS_BETWEEN_RECORDINGS, (ended - self._began) / RECORDING_SHARE)


def facts(command: str, world: str, time_unit: str) -> dict[str, Any]:
    """What is to be known of a run before its files are read."""
    return {
        "format": FORMAT,
        "gossamer": gossamer.__version__,
        "command": command,
        "world": world,
        "time_unit": time_unit,
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


class RunFolder:
    """The folder of one run: made new, or, with the history that is kept of it, that of a run that goes on."""

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        command: str,
        *,
        world: str = "virtual",
        time_unit: str = "s",
        recorder: Recorder | None = None,
        history: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.path, self.recorder = path, recorder
        self._sparingly = WriteThrottle()
        if history is None:
            make_folder(path)
        write_json(path / RUN, facts(command, world, time_unit))
        lines = [_comment(command), *(f"{name} = {_toml(value)}" for name, value in config.items())]
        with _writing(path):
            _replace(path / CONFIG, lambda place: place.write_text("\n".join(lines) + "\n", encoding="utf-8"))
            (path / SUMMARY).unlink(missing_ok=True)
            kept = "".join(json.dumps(point) + "\n" for point in history or ())
            _replace(path / METRICS, lambda place: place.write_text(kept, encoding="utf-8"))
            self._metrics = (path / METRICS).open("a", encoding="utf-8")

    def metric(self, point: Mapping[str, Any]) -> None:
        """Add one line to the metrics, and renew the recording now and then."""
        with _writing(self.path):
            self._metrics.write(json.dumps(point) + "\n")
            self._metrics.flush()
        if self._sparingly.due:
            self._record(point["time"])

    def _record(self, now: float | None) -> None:
        if self.recorder is None:
            return
        with self._sparingly:
            write_text(self.path / RECORDING, json.dumps(self.recorder.document(now)) + "\n")

    def close(
        self, summary: Mapping[str, Any], history: Sequence[Mapping[str, Any]], weights: Mapping[str, Tensor] | None
    ) -> None:
        """The run is over, or was stopped: keep its figures, its history as it came out in the end, and its model.

        Real workers keep the model themselves.
        """
        lines = "".join(json.dumps(point) + "\n" for point in history)
        with _writing(self.path):
            self._metrics.close()
            _replace(self.path / METRICS, lambda place: place.write_text(lines, encoding="utf-8"))
        self._record(summary["time"])
        if weights is not None:
            about = {name: str(summary[name]) for name in ("method", "topology", "workers", "seed", "steps")}
            save_model(self.path, weights, about)
        write_json(self.path / SUMMARY, summary)


def read_history(path: Path) -> list[dict[str, Any]]:
    """The points of the history that the folder of a run holds."""
    try:
        lines = (path / METRICS).read_text(encoding="utf-8").splitlines()
        # The last line of a run that was killed may be half there.
        return [json.loads(line) for line in lines if line.endswith("}")]
    except (OSError, ValueError) as error:
        raise InputError(f"{path / METRICS} cannot be read: {error}") from None


def save_model(folder: Path, weights: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Keep the averaged model, with a few facts about the run."""
    with _writing(folder):
        _replace(folder / MODEL, lambda place: save_file(dict(weights), place, metadata=dict(facts)))


def make_folder(path: Path) -> None:
    """Make the folder, unless it holds a run already."""
    check_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path} cannot be made: {error.strerror}; give a folder you may write to") from None
    if not os.access(path, os.W_OK):
        raise InputError(f"--out {path} cannot be written to: give a folder you may write to")


def check_folder(path: Path) -> None:
    """Raise an ``InputError`` if a run cannot be kept at ``path`` because something is there already."""
    if path.exists() and not path.is_dir():
        raise InputError(f"--out {path} is a file: give the name of a folder, which will be made")
    if any((path / name).exists() for name in (RUN, CONFIG, METRICS, SUMMARY)):
        raise InputError(f"--out {path} already holds a run, which would be lost: give another folder")


def remove_if_empty(paths: Iterable[Path]) -> None:
    """Take folders away again that nothing was put into."""
    for path in paths:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(document, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    with _writing(path.parent):
        _replace(path, lambda place: place.write_text(text, encoding="utf-8"))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"--out {folder} cannot be written to: {why}; make room, or give another folder") from None


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    beside = path.with_name(path.name + ".part")
    write(beside)
    beside.replace(path)


def _toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's too, but for one letter.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    return "# " + "".join(letter if letter.isprintable() else " " for letter in text)
