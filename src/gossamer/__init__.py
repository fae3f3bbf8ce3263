"""Train one PyTorch model on many workers that do not wait for each other."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.api import join, simulate
    from gossamer.optim import AccumAdam, AccumAdamW
    from gossamer.tasks import Task
    from gossamer.topology import Topology

__version__ = "0.1.0"

__all__ = ["AccumAdam", "AccumAdamW", "Task", "Topology", "__version__", "join", "simulate"]

_HOMES = {
    "AccumAdam": "optim",
    "AccumAdamW": "optim",
    "Task": "tasks",
    "Topology": "topology",
    "join": "api",
    "simulate": "api",
}


def __getattr__(name: str) -> Any:
    """What users need is loaded when it is first used, and torch with it: the command hears Ctrl-C before that."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
