"""Checkpoints of a run with real workers.

::

    RUN/checkpoints/480/0.safetensors    worker 0, when all workers together had made 480 steps
    RUN/checkpoints/480/1.safetensors    …
    RUN/checkpoints/480/complete.json    the ranks in it; written once all of them have written theirs

Every worker writes its own file; the monitor writes ``complete.json``. The newest two complete checkpoints are kept.
A worker's file is a safetensors file with the rest of the state as JSON in its header. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gossamer.errors import InputError
from gossamer.runs.run_folder import CHECKPOINTS, CONFIG, write_json

FORMAT = "gossamer worker 2"
COMPLETE = "complete.json"
NUM_KEPT = 2


class Unusable(Exception):
    """A file is not the complete state of a worker; says why."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    ranks: list[int]
    """The workers in it."""
    steps: list[int]
    """The steps that each of them had made."""
    every: int
    """Steps per worker between two checkpoints of the run."""

    @property
    def run_folder(self) -> Path:
        return self.path.parent.parent

    def fits(self, workers: int) -> bool:
        """Return whether this number of workers can each continue as one of those in it."""
        return self.ranks == list(range(workers))

    def mean_steps(self) -> int:
        return round(sum(self.steps) / len(self.steps))

    def total_steps(self, workers: int) -> int:
        """Return the steps that count as done for a run that continues with this number of workers."""
        return sum(self.steps) if self.fits(workers) else workers * self.mean_steps()

    def state(self, rank: int) -> dict[str, Any]:
        return read_state(worker_file(self.path, rank))

    def average(self) -> dict[str, Any]:
        """Return the mean of the models and optimizer states in it, and the status of one worker."""
        states = [self.state(rank) for rank in self.ranks]
        return {name: _mean([state[name] for state in states]) for name in ("model", "optimizer", "status")}


def _mean(values: list[Any]) -> Any:
    """Return the mean of nested data, tensor by tensor; the first of what cannot be averaged."""
    first = values[0]
    if isinstance(first, Tensor):
        if first.is_floating_point():
            return torch.stack([value.double() for value in values]).mean(0).to(first.dtype)
        return first
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values if key in value]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_mean(list(entries)) for entries in zip(*values, strict=False))
    return first


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at ``path``, or the newest of the run there; ``InputError`` if it cannot be used."""
    if not path.exists():
        raise InputError(f"--resume {path} is not there: give the folder of a run, or one of its checkpoints")
    if (path / COMPLETE).exists():
        return _read_checkpoint(path, [])
    complete = _complete_checkpoints(path)
    if not complete:
        runs = sorted(sub.name for sub in path.glob("*") if _complete_checkpoints(sub)) if path.is_dir() else []
        if runs:
            raise InputError(f"--resume {path} holds several runs: give one of them, such as {path / runs[0]}")
        raise InputError(f"--resume {path} holds no complete checkpoint: runs with --checkpoint-every or Ctrl-C do")
    return _read_checkpoint(complete[-1], complete[:-1])


def _complete_checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the oldest first."""
    paths = [path.parent for path in (run_folder / CHECKPOINTS).glob(f"*/{COMPLETE}") if path.parent.name.isdigit()]
    return sorted(paths, key=lambda path: int(path.name))


def _read_checkpoint(path: Path, earlier: list[Path]) -> Checkpoint:
    """Read and check a checkpoint; if it is unusable, the error names the one before."""
    try:
        about = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        ranks, every = [int(rank) for rank in about["ranks"]], int(about["every"])
        steps = [read_num_steps(worker_file(path, rank)) for rank in ranks]
        if not ranks or not (path.parent.parent / CONFIG).exists():
            raise Unusable("its run has no config.toml")
    except (Unusable, OSError, ValueError, KeyError, TypeError) as error:
        why = str(error) if isinstance(error, Unusable) else f"{COMPLETE} is not what gossamer train writes"
        advice = f"the one before may be whole: --resume {earlier[-1]}" if earlier else "there is none before it"
        raise InputError(f"the checkpoint {path} cannot be used: {why}; {advice}") from None
    return Checkpoint(path, ranks, steps, every)


class CheckpointKeeper:
    """Marks checkpoints as complete and deletes old ones; used by the monitor of a run."""

    def __init__(self, run_folder: Path, every: int) -> None:
        self.folder, self.every = run_folder / CHECKPOINTS, every

    def poll(self, ranks: list[int]) -> None:
        """Mark checkpoints as complete that all of ``ranks``, the workers alive, have written."""
        if not self.folder.is_dir() or not ranks:
            return
        paths = sorted((path for path in self.folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
        for path in paths:
            if not (path / COMPLETE).exists() and all(worker_file(path, rank).exists() for rank in ranks):
                write_json(path / COMPLETE, {"ranks": ranks, "every": self.every})
                self._delete_old()

    def _delete_old(self) -> None:
        oldest = int(_complete_checkpoints(self.folder.parent)[-NUM_KEPT:][0].name)
        self._delete(lambda total_steps: total_steps < oldest)

    def delete_after(self, checkpoint: Checkpoint) -> None:
        """Delete checkpoints after the one from which the run is resumed: they will be written again."""
        self._delete(lambda total_steps: total_steps > int(checkpoint.path.name))

    def _delete(self, unwanted: Callable[[int], bool]) -> None:
        for path in self.folder.iterdir():
            if path.name.isdigit() and unwanted(int(path.name)):
                shutil.rmtree(path, ignore_errors=True)


# The file of one worker


def worker_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"{rank}.safetensors"


def write_state(path: Path, state: Mapping[str, Any], num_steps: int) -> None:
    """Write ``state``, nested data with tensors in it, of a worker that has made ``num_steps`` steps.

    The file is renamed when it is complete, so it exists as a whole or not at all. ``OSError`` if that fails.
    """
    tensors: dict[str, Tensor] = {}
    rest = json.dumps(_pack(dict(state), "", tensors))
    part = path.with_name(path.name + ".part")
    try:
        save_file(tensors, part, metadata={"format": FORMAT, "steps": str(num_steps), "state": rest})
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise
        raise OSError(None, str(error)) from None


def read_state(path: Path) -> dict[str, Any]:
    """Read what ``write_state`` wrote, tensors in host memory; ``Unusable`` if it is not complete."""
    with _open_state(path) as file:
        rest = file.metadata()["state"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    unpacked = _unpack(json.loads(rest), tensors)
    assert isinstance(unpacked, dict)
    return unpacked


def read_num_steps(path: Path) -> int:
    """Read how many steps the worker of this file had made; ``Unusable`` if it is not complete."""
    with _open_state(path) as file:
        return int(file.metadata()["steps"])


def _open_state(path: Path) -> Any:
    try:
        # Opening checks that the file is as long as its header says.
        file = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise Unusable(f"{path.name} is missing") from None
    except (OSError, SafetensorError):
        raise Unusable(f"{path.name} is truncated, or no safetensors file") from None
    if (file.metadata() or {}).get("format") != FORMAT:
        raise Unusable(f"{path.name} was not written by this version of gossamer train")
    return file


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON data; tensors move to ``tensors`` under the path that leads to them."""
    if isinstance(value, Tensor):
        # A copy: tensors may be views of one vector.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(entry, f"{name}/{key}", tensors)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        packed = [_pack(entry, f"{name}/{position}", tensors) for position, entry in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": packed}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _pack(torch.from_numpy(value), name, tensors)
    assert value is None or isinstance(value, bool | int | float | str), f"{name} is a {type(value).__name__}"
    return value


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(entry, tensors) for key, entry in content}
    entries = [_unpack(entry, tensors) for entry in content]
    return tuple(entries) if kind == "tuple" else entries
