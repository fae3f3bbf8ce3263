"""Arguments of Accelerate that mean something else, or nothing, if workers do not wait for each other."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from accelerate.utils import DataLoaderConfiguration

from gossamer.errors import InputError

SHARDING = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "torch_tp_plugin")
"""Arguments that spread one model over several processes, as does ``parallelism_config``."""

SHARDING_ENV = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
"""What ``accelerate launch`` sets as ``ACCELERATE_USE_…``."""


def check_not_sharded(arguments: dict[str, Any]) -> None:
    """Refuse what spreads one model over several processes."""
    given = [name for name in (*SHARDING, "parallelism_config") if arguments.get(name) is not None]
    told = [f"ACCELERATE_USE_{name}" for name in SHARDING_ENV]
    given += [name for name in told if os.environ.get(name, "false").lower() == "true"]
    if given:
        raise InputError(
            f"{given[0]} spreads one model over several workers: with Gossamer each worker holds a whole replica, "
            "leave it out"
        )


def dealing(given: DataLoaderConfiguration | None, seed: int) -> DataLoaderConfiguration:
    """Return how data is dealt: every worker draws the same order by itself and takes its share of it."""
    given = given or DataLoaderConfiguration()
    if given.dispatch_batches:
        raise InputError(
            "dispatch_batches=True lets rank 0 read the data of all workers, which would wait for it: leave it out"
        )
    return dataclasses.replace(
        given,
        dispatch_batches=False,
        use_seedable_sampler=True,
        data_seed=seed if given.data_seed is None else given.data_seed,
    )
