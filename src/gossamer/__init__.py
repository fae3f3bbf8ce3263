"""Train one PyTorch model on many workers that do not wait for each other."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer import compress, effects, testing
    from gossamer.api import join, simulate
    from gossamer.compress import Compressor
    from gossamer.errors import InputError
    from gossamer.methods import Method, MethodConfig
    from gossamer.optim import AccumAdam, AccumAdamW
    from gossamer.process.events import Event, EventKind
    from gossamer.process.net.tls import TlsFiles
    from gossamer.process.replica.place import Replica
    from gossamer.process.runtime.swarm import Swarm
    from gossamer.process.state.mean_checkpoint import load_mean
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
    "Event",
    "EventKind",
    "InputError",
    "Method",
    "MethodConfig",
    "Point",
    "Replica",
    "SimulationResult",
    "Spread",
    "Swarm",
    "Task",
    "TlsFiles",
    "Topology",
    "Worker",
    "WorkerPoint",
    "__version__",
    "compress",
    "effects",
    "join",
    "load_mean",
    "simulate",
    "testing",
]

_EXPORTS = {
    "gossamer.api": ("join", "simulate"),
    "gossamer.compress": ("Compressor",),
    "gossamer.errors": ("InputError",),
    "gossamer.methods": ("Method", "MethodConfig"),
    "gossamer.optim": ("AccumAdam", "AccumAdamW"),
    "gossamer.process.events": ("Event", "EventKind"),
    "gossamer.process.net.tls": ("TlsFiles",),
    "gossamer.process.replica.place": ("Replica",),
    "gossamer.process.runtime.swarm": ("Swarm",),
    "gossamer.process.state.mean_checkpoint": ("load_mean",),
    "gossamer.results": ("Point", "Spread", "WorkerPoint"),
    "gossamer.tasks": ("Task",),
    "gossamer.topology": ("Topology",),
    "gossamer.virtual.simulation": ("SimulationResult",),
    "gossamer.worker": ("Worker",),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: ``import gossamer`` alone does not load torch."""
    if name in ("compress", "effects", "testing"):
        return import_module(f"gossamer.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'gossamer' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
