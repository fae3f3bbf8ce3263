"""Train one PyTorch model on many workers that do not wait for each other."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer import compress, effects
    from gossamer.api import join, simulate
    from gossamer.compress import Compressor
    from gossamer.errors import InputError
    from gossamer.methods import Method, MethodConfig
    from gossamer.optim import AccumAdam, AccumAdamW
    from gossamer.process.runtime.swarm import Swarm
    from gossamer.results import Point, Spread, WorkerPoint
    from gossamer.tasks import Task
    from gossamer.topology import Topology
    from gossamer.virtual.simulation import SimulationResult
    from gossamer.worker import Worker

__version__ = "0.2.0"

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "Compressor",
    "InputError",
    "Method",
    "MethodConfig",
    "Point",
    "SimulationResult",
    "Spread",
    "Swarm",
    "Task",
    "Topology",
    "Worker",
    "WorkerPoint",
    "__version__",
    "compress",
    "effects",
    "join",
    "simulate",
]

_MODULES = {
    "AccumAdam": "gossamer.optim",
    "AccumAdamW": "gossamer.optim",
    "Compressor": "gossamer.compress",
    "InputError": "gossamer.errors",
    "Method": "gossamer.methods",
    "MethodConfig": "gossamer.methods",
    "Point": "gossamer.results",
    "SimulationResult": "gossamer.virtual.simulation",
    "Spread": "gossamer.results",
    "Swarm": "gossamer.process.runtime.swarm",
    "Task": "gossamer.tasks",
    "Topology": "gossamer.topology",
    "Worker": "gossamer.worker",
    "WorkerPoint": "gossamer.results",
    "join": "gossamer.api",
    "simulate": "gossamer.api",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: ``import gossamer`` alone does not load torch."""
    if name in ("compress", "effects"):
        return import_module(f"gossamer.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
