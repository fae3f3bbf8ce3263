"""The settings of a loop of one's own, for its run folder."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.methods import AnyMethod, Method, find
from gossamer.process.runtime.worker_runtime import WorkerRuntime
from gossamer.settings import from_values
from gossamer.wire import Codec


def loop_config(
    runtime: WorkerRuntime,
    method: AnyMethod,
    settings: Mapping[str, Any],
    topology: str,
    seed: int,
    codec: Codec | None,
    transport: str,
) -> dict[str, Any]:
    """Return all settings by name. What is called ``task`` in other runs is the script."""
    flat_model = runtime.flat_model
    script = Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c") else "python"
    optimizer = flat_model.optimizer
    about = {
        "task": script,
        "method": runtime.method.name,
        "topology": topology,
        "workers": runtime.everybody.value.first,
        "seed": seed,
        "model": type(flat_model.model).__name__,
        "parameters": flat_model.flat.size,
        "optimizer": type(optimizer).__name__,
        "lr": float(optimizer.param_groups[0].get("lr", 0.0)),
        "wire": "float32" if codec is None else codec.name,
        "transport": transport,
        "device": str(flat_model.device),
    }
    return {**_options(method, settings), **about}


def _options(method: AnyMethod, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of a method; of one that the user has built, those that it keeps under their names."""
    if not isinstance(method, Method):
        return dataclasses.asdict(from_values(find(method).Config, settings))
    options = {field.name: getattr(method, field.name, None) for field in dataclasses.fields(method.Config)}
    return {name: value for name, value in options.items() if isinstance(value, str | int | float | bool)}


def shown_command() -> str:
    return shlex.join(["python", *sys.argv]) if sys.argv and sys.argv[0] != "" else "python"
