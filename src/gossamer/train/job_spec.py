"""What a worker is told to do: the run, and what is kept of it. Plain data, so that it can be handed to a process."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.config import Run, resolve
from gossamer.errors import InputError
from gossamer.hardware import ComputeTimes, HardwareConfig
from gossamer.topology import names as topologies

DEFAULT_WORKERS = 4
"""Real workers take real cores: fewer than virtual ones."""

SIMULATED = ("clock", "gradient_backend", "link", "node_link", "slow_link", "fail", "join")
"""Settings that describe a simulation; a real run has the real thing."""

_SIMULATED_DEFAULTS = {"clock": "hardware", "gradient_backend": "auto"}


@dataclass(frozen=True)
class JobSpec:
    """One run for real workers, as each of them gets it."""

    values: dict[str, Any]
    """The settings of the run by name."""
    folder: str = ""
    """Where the run is kept; empty: nowhere."""
    checkpoint_every: int = 0
    """Steps per worker between two checkpoints; 0: none but the one that Ctrl-C leaves."""
    checkpoint: str = ""
    """The checkpoint to go on from; empty: start anew."""
    trace: bool = False
    """Whether every worker writes down every event."""

    def run(self) -> Run:
        (run,) = resolve(self.values)
        return run

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: str) -> JobSpec:
        return cls(**json.loads(text))

    @property
    def path(self) -> Path | None:
        return Path(self.folder) if self.folder else None

    def compute(self, workers: int) -> ComputeTimes:
        """How long a step takes at least, and which workers are slow."""
        straggler = str(self.values.get("straggler", ""))
        # Whatever it says, without --compute only the factors of the stragglers are used.
        return ComputeTimes(str(self.values.get("compute", "constant:1s")), straggler, workers)

    @property
    def waits(self) -> bool:
        """Whether a step takes a time that was given, as on an accelerator, instead of just what it takes here."""
        return "compute" in self.values


def real_settings(values: dict[str, Any], started: int | None) -> list[dict[str, Any]]:
    """The settings of each of the runs that ``values`` describe for real workers; ``started``: how many there are."""
    kept = dict(values)
    for name in SIMULATED:
        default = _SIMULATED_DEFAULTS.get(name, "") or getattr(HardwareConfig, name, "")
        if kept.pop(name, default) != default:
            flag = "--" + name.replace("_", "-")
            raise InputError(
                f"{flag} is for simulated workers, and these are real: leave it out, or take gossamer simulate"
            )
    if started is not None and int(kept.get("workers", started)) != started:
        raise InputError(f"--workers is {kept['workers']}, but {started} were started: leave it out")
    if str(kept.get("topology", "ring")).partition(":")[0] in topologies():
        kept.setdefault("workers", started or DEFAULT_WORKERS)
    runs = resolve(kept)
    for run in runs:
        check(run, kept)
    if started is not None and runs[0].config.workers != started:
        raise InputError(
            f"the topology has {runs[0].config.workers} workers, but {started} were started: start as many"
        )
    return [_of_one_method(run, kept) for run in runs]


def _of_one_method(run: Run, values: dict[str, Any]) -> dict[str, Any]:
    """All settings of one run: what was given, and what suits the task and the method."""
    described = set(SIMULATED) | {"epochs"} | ({"compute"} - values.keys())
    return {name: value for name, value in run.values().items() if name not in described}


def check(run: Run, values: dict[str, Any]) -> None:
    """Raise an ``InputError`` if real workers cannot do what is asked."""
    compute = JobSpec(values).compute(run.config.workers)
    if "compute" not in values and compute.factor.min() < 1:
        raise InputError("--straggler has a factor below 1: a real worker can only be slowed down")
    if not run.task.gradients and "compute" not in values:
        raise InputError(
            f"{run.task.name} has no gradients, so a step takes no time: say how long, such as --compute 10ms"
        )
