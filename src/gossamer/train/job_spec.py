"""A job for real workers as plain data, handed to every worker's process: its settings and what is kept of it."""

from __future__ import annotations

import dataclasses
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.config import Run, resolve
from gossamer.errors import InputError
from gossamer.hardware import ComputeTimes, HardwareConfig
from gossamer.methods import find
from gossamer.seeds import stream
from gossamer.topology import names as topologies
from gossamer.train.pacing import Pace

DEFAULT_WORKERS = 4
"""Fewer than the default of virtual workers: real ones take real cores."""

SIMULATED = (
    *("clock", "gradient_backend", "link", "node_link", "slow_link", "replica_link", "replica_blocks"),
    *("fail", "join"),
)
"""Settings that describe a simulation; they do not apply to real workers."""

_SIMULATED_DEFAULTS = {"clock": "hardware", "gradient_backend": "auto"}


@dataclass(frozen=True)
class JobSpec:
    """One run with real workers, as each of them gets it."""

    values: dict[str, Any]
    """The settings of the run by name."""
    folder: str = ""
    """The run folder; empty: nothing is kept."""
    checkpoint_every: int = 0
    """Steps per worker between two checkpoints; 0: only the one that Ctrl-C leaves."""
    checkpoint: str = ""
    """The checkpoint to resume from; empty: start anew."""
    trace: bool = False
    """Whether every worker writes a trace of all its events."""
    named_from: int = 0
    """What is added to the steps in the names of checkpoints, if the run was resumed with fewer workers."""
    done_before: int = 0
    """For workers that come later: the steps of a run that was resumed which no worker counts as its own."""

    def run(self) -> Run:
        (run,) = resolve(self.values)
        return run

    @property
    def method(self) -> str:
        """The name of its method; the settings may have a file instead."""
        return find(self.values["method"]).name

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        return cls(**json.loads(text))

    @property
    def path(self) -> Path | None:
        return Path(self.folder) if self.folder else None

    def compute_times(self, workers: int) -> ComputeTimes:
        """Return how long gradients take at least, and which workers are slow."""
        straggler = str(self.values.get("straggler", ""))
        # Without --compute only the stragglers' factors are used, whatever time stands here.
        return ComputeTimes(str(self.values.get("compute", "constant:1s")), straggler, workers)

    def pace(self, run: Run, rank: int, stop: threading.Event, shard: int = 0) -> Pace:
        """Return what delays the gradients of worker ``rank``: with --compute to a given time, as on an accelerator.

        ``shard``: which rank of it, if the worker is a replica.
        """
        c = run.config
        rng = stream(c.seed, "compute", rank, *([shard] if shard else []))
        return Pace(self.compute_times(max(c.workers, rank + 1)), "compute" in self.values, rank, rng, stop)


def real_settings(values: dict[str, Any], num_started: int | None) -> list[dict[str, Any]]:
    """Return the settings of each run that ``values`` describe; ``num_started``: workers that a launcher started."""
    settings = dict(values)
    if num_started is not None and str(settings.get("replica_size", 1)) != "1":
        raise InputError(
            f"--replica-size is {settings['replica_size']}, and a launcher started these processes: gossamer train "
            "starts replicas on one machine; on several, gossamer.join with mesh= does, one torchrun per replica"
        )
    for name in SIMULATED:
        default = _SIMULATED_DEFAULTS.get(name, "") or getattr(HardwareConfig, name, "")
        if settings.pop(name, default) != default:
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag} is for simulated workers, and these are real: leave it out, or take gossamer simulate"
            )
    if num_started is not None and int(settings.get("workers", num_started)) != num_started:
        raise InputError(f"--workers is {settings['workers']}, but {num_started} were started: leave it out")
    if str(settings.get("topology", "ring")).partition(":")[0] in topologies():
        settings.setdefault("workers", num_started or DEFAULT_WORKERS)
    runs = resolve(settings)
    for run in runs:
        check(run, settings)
    if num_started is not None and runs[0].config.workers != num_started:
        raise InputError(
            f"the topology has {runs[0].config.workers} workers, but {num_started} were started: start as many"
        )
    return [_settings_of_run(run, settings) for run in runs]


def _settings_of_run(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    """Return all settings of one run: those given, and the defaults of its task and method."""
    left_out = set(SIMULATED) | {"epochs"} | ({"compute"} - given.keys())
    return {name: value for name, value in run.values().items() if name not in left_out}


def check(run: Run, values: dict[str, Any]) -> None:
    """Raise an ``InputError`` if real workers cannot do what is asked."""
    compute_times = JobSpec(values).compute_times(run.config.workers)
    if "compute" not in values and compute_times.factor.min() < 1:
        raise InputError("--straggler has a factor below 1: a real worker can only be slowed down")
    if run.config.replica_size > 1 and run.codec is not None:
        raise InputError("--wire does not work with --replica-size yet: leave it out")
    if not run.task.gradients and "compute" not in values:
        raise InputError(
            f"{run.task.name} has no gradients, so a step takes no time: say how long, such as --compute 10ms"
        )
