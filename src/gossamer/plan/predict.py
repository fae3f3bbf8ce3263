"""From machines and a way of training to what it would be like: time per step, what limits it, bytes, mixing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gossamer.errors import InputError
from gossamer.methods import METHODS, find
from gossamer.plan import replay
from gossamer.plan.closed_form import FORMS, Forecast, Scene
from gossamer.plan.disagreement import contraction
from gossamer.settings import from_values
from gossamer.topology import Topology, build, names

VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "localsgd": ({"period": 4}, {"period": 8}, {"period": 16}, {"period": 32}),
    "lasgd": ({"period": 1}, {"period": 8}),
    "divisible": ({"period": 8, "ratio": 128.0}, {"period": 32, "ratio": 128.0}, {"period": 32, "ratio": 1024.0}),
    "gossip": ({"rate": 0.5}, {"rate": 1.0}, {"rate": 2.0}),
    "a2cid2": ({"rate": 0.5}, {"rate": 1.0}, {"rate": 2.0}),
}
"""The settings of each method that are tried; others are tried with their defaults."""

BY_ALL = ("allreduce", "localsgd", "lasgd", "divisible")
"""Methods that average over all workers, whoever talks to whom."""

COMPUTE, SLOWEST, LATENCY = "compute", "slowest worker", "latency"
BANDWIDTH, EXPOSED = "inter-node bandwidth", "exposed communication"

SMALL = 0.1
"""A share of the step that is not worth naming."""


@dataclass(frozen=True)
class Candidate:
    """One way to train."""

    method: str
    topology: str
    options: Mapping[str, Any]

    @property
    def period(self) -> float:
        """Steps between two averagings of a worker."""
        if "rate" in self.options:
            return float(1 / self.options["rate"])
        return float(self.options.get("period", 1))

    @property
    def over_a_graph(self) -> bool:
        """Whether it matters who talks to whom."""
        return self.method not in BY_ALL

    @property
    def label(self) -> str:
        """The method and its settings, in a few words."""
        said = [f"{name} {value:g}" for name, value in self.options.items() if name != "period"]
        if "period" in self.options:
            said.insert(0, f"every {self.options['period']}")
        return ", ".join([self.method, *said])


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a candidate comes to on given machines."""

    candidate: Candidate
    workers: int
    step_s: float
    interval_s: tuple[float, float]
    """Where nine of ten runs end up."""
    free_s: float
    """The step if communication took no time."""
    bound_by: str
    bytes_per_step: float
    memory_bytes: float
    contraction: float
    late_steps: float
    """How many steps late most of a gradient takes effect, where models are kept alike at that price."""


def candidates(
    workers: int, nodes: int, methods: Sequence[str] = (), topologies: Sequence[str] = ()
) -> Iterator[Candidate]:
    """All candidates for so many workers; topologies that were not asked for by name and do not fit are left out."""
    for method in methods or METHODS:
        find(method)
        for options in VARIANTS.get(method, ({},)):
            if method in BY_ALL:
                yield Candidate(method, "complete", options)
                continue
            for topology in topologies or names():
                try:
                    graph(topology, workers, nodes)
                except InputError:
                    if topologies:
                        raise
                    continue
                yield Candidate(method, topology, options)


@lru_cache(maxsize=256)
def graph(topology: str, workers: int, nodes: int) -> Topology:
    """A topology by name, kept: a plan asks for each many times."""
    return build(topology, workers=workers, nodes=nodes)


def predict(scene: Scene, candidate: Candidate) -> Prediction:
    """What ``candidate`` comes to in this scene."""
    topology = graph(candidate.topology, scene.workers, scene.machines.nodes)
    form = FORMS.get(candidate.method)
    if form is None:
        found = replay.forecast(scene, candidate.method, candidate.topology, candidate.options)
    else:
        found = form(scene, topology, from_values(find(candidate.method).Config, candidate.options))
    low, high = np.quantile(found.step_s, (0.05, 0.95))
    return Prediction(
        candidate=candidate,
        workers=scene.workers,
        step_s=float(found.step_s.mean()),
        interval_s=(float(low), float(high)),
        free_s=float(found.free_s.mean()),
        bound_by=bound_by(scene, found),
        bytes_per_step=found.bytes_per_step,
        memory_bytes=found.memory_vectors * scene.size_bytes,
        contraction=contraction(found.disagreement),
        late_steps=found.late_steps,
    )


def bound_by(scene: Scene, found: Forecast) -> str:
    """What a step would gain most from: no waiting for slow workers, or for messages; compute if neither is much."""
    step, free = float(found.step_s.mean()), float(found.free_s.mean())
    waiting, exposed = max(0.0, free - scene.usual_s), max(0.0, step - free)
    if waiting + exposed < SMALL * step:
        return COMPUTE
    if waiting >= exposed:
        return SLOWEST if waiting > SMALL * step / 2 else COMPUTE
    timing = found.timing
    if timing.latency_s > timing.transfer_s:
        return LATENCY
    return BANDWIDTH if timing.crosses else EXPOSED


def ddp_step_s(scene: Scene) -> float:
    """What DDP, which sends gradients while the backward pass still runs, takes at best."""
    timing = scene.times.mean(scene.everybody(), scene.size_bytes).after(scene.usual_s)
    compute = float(scene.compute.max(axis=-1).mean())
    return compute + max(0.0, timing.seconds - scene.machines.compute.typical_backward_s)
