"""The folder of a run: names, layout and writing of its files.

    DIR/run.json             about the run: format of this folder, version, command, method, kind and unit of its times
    DIR/config.toml          every setting, in the form that --config reads
    DIR/metrics.jsonl        one line per point of the history, appended during the run
    DIR/recording.json       what the workers did and when, summarised (``recording.Recorder.document``); rewritten
                             during the run
    DIR/trace.json           every single event, with --trace
    DIR/summary.json         the final figures, written at the end
    DIR/model.safetensors    the averaged model

Real workers write these instead of DIR/recording.json:

    DIR/workers/N.recording.json   what worker N did; N.1.recording.json after its first restart
    DIR/workers/N.trace.json       every single event of worker N, with --trace
    DIR/workers/N.jsonl            the status of worker N, appended during the run
    DIR/workers/N.log              the output of worker N, including tracebacks
    DIR/workers/N-K.log            that of rank K of worker N, if it is a replica; N.log is that of its rank 0
    DIR/workers/ranks/N-K.recording.json   what rank K of worker N did
    DIR/checkpoints/               the checkpoints, from which --resume continues

A loop of one's own (``gossamer.join`` with ``out``) writes the same, without N.log and checkpoints; its config.toml is
not for --config.

A file is written under another name and then renamed, so readers never see half of it. Only metrics and status grow
line by line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import gossamer
from gossamer.errors import InputError
from gossamer.results import Point, to_json_data

if TYPE_CHECKING:
    from torch import Tensor

    from gossamer.recording import Recorder

RUN, CONFIG, METRICS, SUMMARY, MODEL = "run.json", "config.toml", "metrics.jsonl", "summary.json", "model.safetensors"
RECORDING, TRACE = "recording.json", "trace.json"
WORKERS, CHECKPOINTS = "workers", "checkpoints"
RANKS = "ranks"

FORMAT = 1
"""Version of the layout. It increases when older versions cannot read a folder any more."""

MIN_RECORDING_INTERVAL_S = 1.0
MAX_RECORDING_SHARE = 0.005
"""Share of the run's time that may be spent on writing recordings."""


class WriteThrottle:
    """Limits how often a recording is written: the more CPU one write takes, the longer the pause. Use as ``with``.

    It counts CPU, not time: a write that had to wait for a busy machine must not put off the next one.
    """

    def __init__(self) -> None:
        self._next = self._began = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        busy_s = time.thread_time() - self._began
        self._next = time.monotonic() + max(MIN_RECORDING_INTERVAL_S, busy_s / MAX_RECORDING_SHARE)


class RunFolder:
    """The folder of one run: a new one, or with ``history`` that of a run that is resumed.

    Files are created with the first point: a run that never starts leaves none behind.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        command: str,
        *,
        method: str,
        world: str = "virtual",
        time_unit: str = "s",
        recorder: Recorder | None = None,
        history: Sequence[Point] | None = None,
    ) -> None:
        self.path, self.config, self.command, self.recorder = path, config, command, recorder
        self.about = {
            "format": FORMAT,
            "gossamer": gossamer.__version__,
            "command": command,
            "method": method,
            "world": world,
            "time_unit": time_unit,
        }
        self._history = history
        self._throttle = WriteThrottle()
        self._metrics: TextIO | None = None

    def _create(self) -> TextIO:
        path, history = self.path, [to_json_data(asdict(point)) for point in self._history or ()]
        if self._history is None:
            make_folders([path])
        write_json(path / RUN, {**self.about, "started": datetime.now(UTC).isoformat(timespec="milliseconds")})
        lines = [_comment(self.command), *(f"{name} = {_toml(value)}" for name, value in self.config.items())]
        with _writing(path):
            _replace(path / CONFIG, lambda part: part.write_text("\n".join(lines) + "\n", encoding="utf-8"))
            (path / SUMMARY).unlink(missing_ok=True)
            _replace(path / METRICS, lambda part: part.write_text(_json_lines(history), encoding="utf-8"))
            return (path / METRICS).open("a", encoding="utf-8")

    def metric(self, point: Point) -> None:
        """Append one line to the metrics, and rewrite the recording if it is due."""
        if self._metrics is None:
            self._metrics = self._create()
        with _writing(self.path):
            self._metrics.write(json.dumps(to_json_data(asdict(point))) + "\n")
            self._metrics.flush()
        if self._throttle.due:
            self._record(point.time)

    def _record(self, now: float | None) -> None:
        if self.recorder is None:
            return
        with self._throttle:
            write_text(self.path / RECORDING, json.dumps(self.recorder.document(now)) + "\n")

    def leave(self) -> None:
        """Stop writing before the end of the run, which goes on without this writer."""
        if self._metrics is not None:
            self._metrics.close()

    def close(self, document: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the summary, the complete history and the averaged model at the end of the run, if it has begun.

        Real workers write the model themselves: then ``weights`` is None.
        """
        if self._metrics is None:
            return
        lines, summary = _json_lines(document["history"]), _without_history(document)
        with _writing(self.path):
            self._metrics.close()
            _replace(self.path / METRICS, lambda part: part.write_text(lines, encoding="utf-8"))
        self._record(summary["time"])
        if weights is not None:
            metadata = {name: str(summary[name]) for name in ("method", "topology", "workers", "seed", "steps")}
            save_model(self.path, weights, metadata)
        write_json(self.path / SUMMARY, summary)


def write_comparison(folder: Path, document: Mapping[str, Any]) -> None:
    """Write the summary of several runs, each in its own folder below this one."""
    write_json(folder / SUMMARY, {**document, "results": list(map(_without_history, document["results"]))})


def _without_history(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "history"}


def read_history(path: Path) -> list[dict[str, Any]]:
    try:
        lines = (path / METRICS).read_text(encoding="utf-8").splitlines()
        # The last line of a run that was killed may be incomplete.
        return [json.loads(line) for line in lines if line.endswith("}")]
    except (OSError, ValueError) as error:
        raise InputError(f"{path / METRICS} cannot be read: {error}") from None


def save_model(folder: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    save_file_at(folder / MODEL, weights, metadata)


def save_file_at(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; readers never see half of it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def save(part: Path) -> None:
        try:
            save_file(dict(weights), part, metadata=dict(metadata))
        except SafetensorError as error:
            # Safetensors reports a full disk in a way of its own.
            part.unlink(missing_ok=True)
            raise OSError(None, f"{error}") from None

    with _writing(path.parent):
        _replace(path, save)


def make_folders(paths: Sequence[Path]) -> None:
    """Create the folders of runs. Raise an ``InputError`` if one contains a run or cannot be written to."""
    for path in paths:
        if path.exists() and not path.is_dir():
            raise InputError(f"--out {path} is a file: give the name of a folder, which will be created")
        if any((path / name).exists() for name in (RUN, CONFIG, METRICS, SUMMARY)):
            raise InputError(f"--out {path} already contains a run, which would be lost: give another folder")
    for path in paths:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--out {path} cannot be created: {error.strerror}; give a folder that you may write to"
            ) from None
        if not os.access(path, os.W_OK):
            raise InputError(f"--out {path} cannot be written to: give a folder that you may write to")


def remove_if_empty(paths: Iterable[Path]) -> None:
    for path in paths:
        # Other workers may do the same at this moment, or write into it.
        with suppress(OSError):
            path.rmdir()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(document, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in the folder of a run. Readers never see half of it."""
    with _writing(path.parent):
        _replace(path, lambda part: part.write_text(text, encoding="utf-8"))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into an ``InputError`` about ``--out``."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"--out {folder} cannot be written to: {why}; make room, or give another folder") from None


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    part = path.with_name(path.name + ".part")
    write(part)
    part.replace(path)


def _json_lines(points: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(point) + "\n" for point in points)


def _toml(value: Any) -> str:
    # Strings, numbers and booleans of JSON are valid in TOML, except for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    return "# " + "".join(character if character.isprintable() else " " for character in text)
