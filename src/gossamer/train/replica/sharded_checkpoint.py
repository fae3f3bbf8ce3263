"""The sharded part of a checkpoint: tensors on several ranks, in the format of ``torch.distributed.checkpoint``.

Torch keeps the layout of such a folder in a pickle. It is read without running anything that a pickle could name:
only the classes that describe tensors are allowed.
"""

from __future__ import annotations

import collections
import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from gossamer.errors import InputError
from gossamer.train.checkpoint import SHARDED_COMPLETE, Template
from gossamer.vectors.flat import is_sharded


def save(folder: Path, tensors: Mapping[str, Tensor], process_group: Any) -> None:
    """Write tensors that are spread over the ranks of the group, which all call this. ``OSError`` if that fails."""
    try:
        with warnings.catch_warnings():
            # It warns that it overwrites, which a run that was resumed may do.
            warnings.simplefilter("ignore")
            dcp.save(dict(tensors), storage_writer=FileSystemWriter(folder), process_group=process_group)
    except dcp.api.CheckpointException as error:
        (cause, *_) = error.failures.values()
        raise OSError(None, str(getattr(cause[0], "strerror", None) or cause[0])) from None


def sizes(folder: Path) -> dict[str, torch.Size]:
    """Return the names and sizes of the tensors in a folder. InputError if torch did not write it."""
    return {
        name: about.size
        for name, about in Reader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }


def load(folder: Path, names: Iterable[str] | None = None, template: Template | None = None) -> dict[str, Tensor]:
    """Read tensors by name, by default all: of those with a template this rank's part, of the others the whole.

    InputError if the folder is not what torch writes.
    """
    known = Reader(folder).read_metadata().state_dict_metadata
    found: dict[str, Tensor] = {}
    for name in known if names is None else names:
        about = known.get(name)
        if names is None and not isinstance(about, TensorStorageMetadata):
            continue
        if not isinstance(about, TensorStorageMetadata):
            raise InputError(f"{folder} has no tensor {name}: was it written by the same model?")
        like = None if template is None else template(name, about.size)
        dtype = about.properties.dtype
        if like is not None and is_sharded(like):
            found[name] = torch.empty_like(like, dtype=dtype)
        else:
            found[name] = torch.empty(about.size, dtype=dtype)
    try:
        with warnings.catch_warnings():
            # It warns that it reads in a single process, which is meant.
            warnings.simplefilter("ignore")
            dcp.load(found, storage_reader=Reader(folder), no_dist=True)
    except (dcp.api.CheckpointException, OSError, RuntimeError, ValueError, EOFError) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise InputError(f"{folder} cannot be read: {cause[:200]}") from None
    return found


def laid_out_as(value: Tensor, like: Tensor | None) -> Tensor:
    """Return ``value`` spread over ranks as ``like`` is, if it is and ``value`` is whole. Nothing is sent."""
    if not isinstance(like, DTensor) or is_sharded(value):
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


class Reader(FileSystemReader):
    """Reads a folder that ``dcp.save`` wrote, whoever it is from."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / SHARDED_COMPLETE
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except FileNotFoundError:
            raise InputError(
                f"{self.path} has no {SHARDED_COMPLETE}: expected what torch.distributed.checkpoint wrote"
            ) from None
        except (
            OSError,
            pickle.UnpicklingError,
            EOFError,
            AttributeError,
            ImportError,
            IndexError,
            ValueError,
        ) as error:
            raise InputError(f"{path} cannot be read: {error}") from None
        if not isinstance(metadata, Metadata):
            raise InputError(f"{path} is not what torch.distributed.checkpoint wrote")
        storage = metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    """Builds what describes tensors, and refuses everything else."""

    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    NAMES: ClassVar[dict[tuple[str, str], Any]] = {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): collections.OrderedDict,
        # Where it was written; a pure path opens nothing.
        ("pathlib", "PosixPath"): PurePosixPath,
        ("pathlib._local", "PosixPath"): PurePosixPath,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.NAMES:
            return self.NAMES[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.memory_format):
            return getattr(torch, name)
        if module in self.MODULES and not name.startswith("__"):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
