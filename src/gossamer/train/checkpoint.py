"""What a run can be resumed from.

::

    RUN/checkpoints/480/0.safetensors    worker 0, at the moment when all workers together had made 480 steps
    RUN/checkpoints/480/1.safetensors    …
    RUN/checkpoints/480/complete.json    who is in it; there once everybody is

Every worker writes its own file; whoever watches the run says when a checkpoint is complete. The last two that are
complete are kept.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import InputError
from gossamer.runfolder import CHECKPOINTS, CONFIG, write_json
from gossamer.train.state_file import Unusable, read_state, steps_made

COMPLETE = "complete.json"
KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    ranks: list[int]
    """The workers that are in it."""
    made: list[int]
    """The steps that each of them had made."""
    every: int
    """Steps per worker between two checkpoints of the run."""

    @property
    def run_folder(self) -> Path:
        return self.path.parent.parent

    def file(self, rank: int) -> Path:
        return worker_file(self.path, rank)

    def fits(self, workers: int) -> bool:
        """Whether so many workers can each go on as one of those in it."""
        return self.ranks == list(range(workers))

    def mean_made(self) -> int:
        """The steps per worker, on average."""
        return round(sum(self.made) / len(self.made))

    def total_made(self, workers: int) -> int:
        """The steps that count as made for a run that goes on with so many workers."""
        return sum(self.made) if self.fits(workers) else workers * self.mean_made()

    def state(self, rank: int) -> dict[str, Any]:
        return read_state(self.file(rank))

    def average(self) -> dict[str, Any]:
        """The mean of the models in it, and of what their optimizers remember; the report of one of them."""
        states = [self.state(rank) for rank in self.ranks]
        return {name: _mean([state[name] for state in states]) for name in ("model", "optimizer", "report")}


def worker_file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"{rank}.safetensors"


def _mean(values: list[Any]) -> Any:
    """The mean of nested data, tensor by tensor; of what cannot be averaged, the first."""
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
    """The checkpoint at ``path``, or the newest of the run there; ``InputError`` if it cannot be used."""
    if not path.exists():
        raise InputError(f"--resume {path} is not there: give the folder of a run, or one of its checkpoints")
    if (path / COMPLETE).exists():
        return _read(path, [])
    complete = _complete(path)
    if not complete:
        several = sorted(sub.name for sub in path.glob("*") if _complete(sub)) if path.is_dir() else []
        if several:
            raise InputError(f"--resume {path} holds several runs: give one of them, such as {path / several[0]}")
        raise InputError(f"--resume {path} holds no complete checkpoint: runs with --checkpoint-every or Ctrl-C do")
    return _read(complete[-1], complete[:-1])


def _complete(run_folder: Path) -> list[Path]:
    """The complete checkpoints of a run, the oldest first."""
    found = [path.parent for path in (run_folder / CHECKPOINTS).glob(f"*/{COMPLETE}") if path.parent.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def _read(path: Path, before: list[Path]) -> Checkpoint:
    """The checkpoint at ``path``, checked; if it is unusable, the error names the one before."""
    try:
        about = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        ranks, every = [int(rank) for rank in about["ranks"]], int(about["every"])
        made = [steps_made(worker_file(path, rank)) for rank in ranks]
        if not ranks or not (path.parent.parent / CONFIG).exists():
            raise Unusable("its run has no config.toml")
    except (Unusable, OSError, ValueError, KeyError, TypeError) as error:
        why = str(error) if isinstance(error, Unusable) else f"{COMPLETE} is not what gossamer train writes"
        other = f"the one before may be whole: --resume {before[-1]}" if before else "there is none before it"
        raise InputError(f"the checkpoint {path} cannot be used: {why}; {other}") from None
    return Checkpoint(path, ranks, made, every)


class CheckpointKeeper:
    """Says which checkpoints of a run are complete, and takes old ones away; for whoever watches the run."""

    def __init__(self, run_folder: Path, every: int) -> None:
        self.folder, self.every = run_folder / CHECKPOINTS, every

    def look(self, ranks: list[int]) -> None:
        """``ranks`` are the workers that are there: what they have all written is complete."""
        if not self.folder.is_dir() or not ranks:
            return
        moments = sorted(
            (path for path in self.folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
        )
        for path in moments:
            if not (path / COMPLETE).exists() and all(worker_file(path, rank).exists() for rank in ranks):
                write_json(path / COMPLETE, {"ranks": ranks, "every": self.every})
                self._clear()

    def _clear(self) -> None:
        complete = _complete(self.folder.parent)
        oldest = int(complete[-KEPT:][0].name)
        for path in self.folder.iterdir():
            if path.name.isdigit() and int(path.name) < oldest:
                shutil.rmtree(path, ignore_errors=True)

    def forget_after(self, checkpoint: Checkpoint) -> None:
        """The run goes on from an earlier checkpoint: what came after it is made anew."""
        for path in self.folder.iterdir():
            if path.name.isdigit() and int(path.name) > int(checkpoint.path.name):
                shutil.rmtree(path, ignore_errors=True)
