"""Checkpoints of a run with real workers.

::

    RUN/checkpoints/480/0.safetensors    worker 0, when all workers together had made 480 steps, counted as below
    RUN/checkpoints/480/1.safetensors    …
    RUN/checkpoints/480/complete.json    the ranks in it; written once all of them have written theirs

A run that goes on with fewer workers has made fewer steps in all. What it lacks is added to the names of its
checkpoints, so that later ones always have larger numbers.

If workers are replicas, rank 0 of replica 1 writes ``1.safetensors``, rank 2 of it ``1-2.safetensors``. What is sharded
over the ranks of replica 1 is in the folder ``1.dcp``, in the format of ``torch.distributed.checkpoint``.

Every worker writes its own file; the monitor writes ``complete.json``. The newest two complete checkpoints are kept.
A worker's file is a safetensors file with the rest of the state as JSON in its header. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gossamer.errors import InputError
from gossamer.runs.run_folder import CHECKPOINTS, CONFIG, write_json
from gossamer.vectors.flat import as_part_of, is_sharded, local_part

FORMAT = "gossamer worker 2"
COMPLETE = "complete.json"
SHARDED_COMPLETE = ".metadata"
"""What ``torch.distributed.checkpoint`` writes last."""
NUM_KEPT = 2


Template = Callable[[str, torch.Size], Tensor | None]
"""The tensor of a name and size that is there already, whose layout over ranks the one that is read takes."""


class Unusable(Exception):
    """A file is not the complete state of a worker; says why."""


class Layout(NamedTuple):
    """How the state of a run is spread over processes."""

    workers: int
    replica_size: int = 1
    inside: str = "ddp"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Layout:
        """``values``: the settings of a run."""
        return cls(int(values["workers"]), int(values.get("replica_size", 1)), str(values.get("inside", "ddp")))


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    ranks: list[int]
    """The workers in it."""
    steps: list[int]
    """The steps that each of them had made."""
    every: int
    """Steps per worker between two checkpoints of the run."""
    replica_size: int = 1
    inside: str = "ddp"

    @property
    def run_folder(self) -> Path:
        return self.path.parent.parent

    def fits(self, layout: Layout) -> bool:
        """Return whether each process of this layout can continue as one of those in it."""
        return self.ranks == list(range(layout.workers)) and layout[1:] == (self.replica_size, self.inside)

    def mean_steps(self) -> int:
        return round(sum(self.steps) / len(self.steps))

    def total_steps(self, layout: Layout) -> int:
        """Return the steps that count as done for a run that continues with this layout."""
        return sum(self.steps) if self.fits(layout) else layout.workers * self.mean_steps()

    def named_from(self, layout: Layout) -> int:
        """Return what such a run adds to its steps in the names of checkpoints, so that they come after this one."""
        return max(0, int(self.path.name) - self.total_steps(layout))

    def state(self, rank: int, shard: int = 0, template: Template | None = None) -> dict[str, Any]:
        """Return the state of worker ``rank``, or of one rank of it. ``template``: how sharded tensors are laid out."""
        folder = sharded_folder(self.path, rank)
        state = read_state(worker_file(self.path, rank, shard), folder, template)
        if shard and "model" not in state:
            # DDP: all ranks have what the first one has written.
            shared = self.state(rank, 0, template)
            state |= {name: shared[name] for name in ("model", "optimizer")}
        return state

    def average(self, template: Template | None = None) -> dict[str, Any]:
        """Return the mean of the models and optimizer states in it, and the status of one worker."""
        states = [self.state(rank, template=template) for rank in self.ranks]
        return {name: _mean([state[name] for state in states]) for name in ("model", "optimizer", "status")}


def _mean(values: list[Any]) -> Any:
    """Return the mean of nested data, tensor by tensor; the first of what cannot be averaged."""
    first = values[0]
    if isinstance(first, Tensor):
        if first.is_floating_point():
            parts = torch.stack([local_part(value).double() for value in values])
            return as_part_of(parts.mean(0).to(first.dtype), first)
        return first
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values if key in value]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_mean(list(entries)) for entries in zip(*values, strict=False))
    return first


def find_checkpoint(path: Path, flag: str = "--resume ") -> Checkpoint:
    """Return the checkpoint at ``path``, or the newest of the run there; ``InputError`` if it cannot be used.

    ``flag``: what stands before the path in errors.
    """
    if not path.exists():
        raise InputError(f"{flag}{path} is not there: give the folder of a run, or one of its checkpoints")
    if (path / COMPLETE).exists():
        return _read_checkpoint(path, [])
    complete = _complete_checkpoints(path)
    if not complete:
        runs = sorted(sub.name for sub in path.glob("*") if _complete_checkpoints(sub)) if path.is_dir() else []
        if runs:
            raise InputError(f"{flag}{path} holds several runs: give one of them, such as {path / runs[0]}")
        raise InputError(f"{flag}{path} holds no complete checkpoint: runs with --checkpoint-every or Ctrl-C do")
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
        size, inside = int(about.get("replica_size", 1)), str(about.get("inside", "ddp"))
        steps = [read_num_steps(worker_file(path, rank)) for rank in ranks]
        for rank in ranks:
            for shard in range(1, size):
                read_num_steps(worker_file(path, rank, shard))
            if size > 1 and inside == "fsdp" and not (sharded_folder(path, rank) / SHARDED_COMPLETE).exists():
                raise Unusable(f"{sharded_folder(path, rank).name} is not complete")
        if not ranks or not (path.parent.parent / CONFIG).exists():
            raise Unusable("its run has no config.toml")
    except (Unusable, OSError, ValueError, KeyError, TypeError) as error:
        why = str(error) if isinstance(error, Unusable) else f"{COMPLETE} is not what gossamer train writes"
        advice = f"the one before may be whole: --resume {earlier[-1]}" if earlier else "there is none before it"
        raise InputError(f"the checkpoint {path} cannot be used: {why}; {advice}") from None
    return Checkpoint(path, ranks, steps, every, size, inside)


class CheckpointKeeper:
    """Marks checkpoints as complete and deletes old ones; used by the monitor of a run."""

    def __init__(self, run_folder: Path, every: int, replica_size: int = 1, inside: str = "ddp") -> None:
        self.folder, self.every, self.replica_size, self.inside = run_folder / CHECKPOINTS, every, replica_size, inside

    def poll(self, ranks: list[int]) -> None:
        """Mark checkpoints as complete that all of ``ranks``, the workers alive, have written."""
        if not self.folder.is_dir() or not ranks:
            return
        paths = sorted((path for path in self.folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
        for path in paths:
            files = (worker_file(path, rank, shard) for rank in ranks for shard in range(self.replica_size))
            if not (path / COMPLETE).exists() and all(file.exists() for file in files):
                about: dict[str, Any] = {"ranks": ranks, "every": self.every}
                if self.replica_size > 1:
                    about |= {"replica_size": self.replica_size, "inside": self.inside}
                write_json(path / COMPLETE, about)
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


def worker_file(checkpoint: Path, rank: int, shard: int = 0) -> Path:
    return checkpoint / (f"{rank}-{shard}.safetensors" if shard else f"{rank}.safetensors")


def sharded_folder(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"{rank}.dcp"


def write_state(
    path: Path, state: Mapping[str, Any], num_steps: int, sharded: Callable[[Mapping[str, Tensor]], None] | None = None
) -> None:
    """Write ``state``, nested data with tensors in it, of a worker that has made ``num_steps`` steps.

    The file is renamed when it is complete, so it exists as a whole or not at all. ``OSError`` if that fails.
    ``sharded`` writes the tensors that lie on several ranks elsewhere, before that.
    """
    tensors: dict[str, Tensor] = {}
    apart: dict[str, Tensor] = {}
    rest = json.dumps(_pack(dict(state), "", tensors, apart))
    if sharded is not None:
        sharded(apart)
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


def read_state(path: Path, sharded: Path | None = None, template: Template | None = None) -> dict[str, Any]:
    """Read what ``write_state`` wrote, tensors in host memory; ``Unusable`` if it is not complete.

    ``sharded``: where tensors are that lie on several ranks. ``template``: how this process wants them.
    """
    with _open_state(path) as file:
        rest = json.loads(file.metadata()["state"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    apart = list(_names_apart(rest))
    if apart and sharded is not None:
        # It loads much of torch.distributed.
        from gossamer.train.replica import sharded_checkpoint

        tensors |= sharded_checkpoint.load(sharded, apart, template)
    unpacked = _unpack(rest, tensors)
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


def _pack(value: Any, name: str, tensors: dict[str, Tensor], apart: dict[str, Tensor]) -> Any:
    """Return ``value`` as JSON data; tensors move to ``tensors``, or ``apart``, under the path that leads to them."""
    if isinstance(value, Tensor) and is_sharded(value):
        apart[name] = value.detach()
        return {"sharded": name}
    if isinstance(value, Tensor):
        # A copy: tensors may be views of one vector.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(entry, f"{name}/{key}", tensors, apart)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        packed = [_pack(entry, f"{name}/{position}", tensors, apart) for position, entry in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": packed}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _pack(torch.from_numpy(value), name, tensors, apart)
    assert value is None or isinstance(value, bool | int | float | str), f"{name} is a {type(value).__name__}"
    return value


def _unpack(packed: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind in ("tensor", "sharded"):
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(entry, tensors) for key, entry in content}
    entries = [_unpack(entry, tensors) for entry in content]
    return tuple(entries) if kind == "tuple" else entries


def _names_apart(packed: Any) -> Iterator[str]:
    """Yield the names of the tensors that lie on several ranks."""
    if isinstance(packed, dict):
        ((kind, content),) = packed.items()
        if kind == "sharded":
            yield content
        elif kind != "tensor":
            for entry in content:
                yield from _names_apart(entry[1] if kind == "dict" else entry)
