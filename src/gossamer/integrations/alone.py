"""Let Accelerate take this worker for the only one, so that it makes no process group and wraps nothing in DDP.

Accelerate learns from the environment that there are other workers, when its state is first created. The state then
has documented attributes for the rank, which decide who logs and saves: they get their true values afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from accelerate.state import DistributedType, PartialState

from gossamer.errors import InputError
from gossamer.process.store.rank_info import find_local_rank, find_rank

TOLD = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
"""What launchers say in the environment, and Accelerate listens to."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hide the other workers from what is created in this block, such as ``TrainingArguments``.

    It still knows its rank: only rank 0 logs and saves. If a machine has several GPUs, each worker sees one of them.
    """
    with hidden_workers():
        yield
        # In the block, so that a state that does not exist yet is made without the other workers too.
        state = PartialState()
    (rank, _), local = find_rank(), find_local_rank()
    if state.distributed_type != DistributedType.NO:
        raise InputError(
            f"Accelerate has been set up for {state.distributed_type.value} already: "
            "create no Accelerator, PartialState or TrainingArguments before"
        )
    state.process_index, state.local_process_index = rank, local


@contextlib.contextmanager
def hidden_workers() -> Iterator[None]:
    """Remove what launchers say about other workers from the environment, and choose this worker's GPU."""
    devices = torch.cuda.device_count()
    if devices > 1 and not torch.cuda.is_initialized():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices)))).split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[find_local_rank() % len(visible)]
    told = {name: os.environ.pop(name) for name in TOLD if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(told)
