"""One safetensors file of a model: from the folder of a run, from a checkpoint of it, or from a sharded checkpoint."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.errors import InputError
from gossamer.runs.run_folder import CHECKPOINTS, MODEL, save_file_at
from gossamer.train.checkpoint import COMPLETE, SHARDED_COMPLETE, find_checkpoint

EXPECTED = (
    "expected the folder of a run, one of its checkpoints, or a folder that torch.distributed.checkpoint has written"
)
MODEL_PREFIX = "model."
"""Of the names of a model's tensors in a sharded checkpoint that has an optimizer too."""


def export(source: Path, out: Path) -> str:
    """Write the model in ``source`` to ``out``; return in words what was written. InputError if there is none."""
    if out.exists():
        raise InputError(f"--out {out} is there already: give the name of a new file")
    if not out.parent.is_dir():
        raise InputError(f"--out {out} is in a folder that does not exist: create it first")
    if not source.is_dir():
        raise InputError(f"{source} {'is a file' if source.exists() else 'does not exist'}: {EXPECTED}")
    weights, metadata, what = _read(source)
    save_file_at(out, weights, metadata)
    return what


def _read(source: Path) -> tuple[dict[str, Tensor], dict[str, str], str]:
    """Return the weights, what the file says about them, and the same in words."""
    if (source / SHARDED_COMPLETE).exists():
        # It loads much of torch.distributed.
        from gossamer.train.replica import sharded_checkpoint

        names = list(sharded_checkpoint.sizes(source))
        of_model = [name for name in names if name.startswith(MODEL_PREFIX)]
        tensors = sharded_checkpoint.load(source, of_model or names)
        if not tensors:
            raise InputError(f"{source} has no tensors: {EXPECTED}")
        weights = {name.removeprefix(MODEL_PREFIX): tensor for name, tensor in tensors.items()}
        return weights, {}, "a sharded checkpoint"
    if (source / MODEL).exists():
        try:
            with safe_open(source / MODEL, framework="pt") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return weights, file.metadata() or {}, "the averaged model of a run that has ended"
        except (OSError, SafetensorError) as error:
            raise InputError(f"{source / MODEL} cannot be read: {error}") from None
    if not ((source / COMPLETE).exists() or (source / CHECKPOINTS).is_dir()):
        raise InputError(f"{source} has no model: {EXPECTED}")
    checkpoint = find_checkpoint(source, "")
    weights, workers = checkpoint.average()["model"], len(checkpoint.ranks)
    about = {"workers": str(workers), "steps": str(checkpoint.mean_steps())}
    mean = f"the mean of {workers} workers" if workers > 1 else "one worker"
    return weights, about, f"{mean} after {checkpoint.mean_steps()} steps, from {checkpoint.path}"
