"""Predict step time, bottleneck, bytes and mixing of a candidate: a method with its settings over a topology."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gossamer.methods import METHODS, Method, find
from gossamer.methods import build as build_method
from gossamer.plan.cluster_spec import MEAN
from gossamer.plan.runtime_model.closed_form import FORMS
from gossamer.plan.runtime_model.cluster_model import ClusterModel, Forecast
from gossamer.replica_time import ReplicaShape
from gossamer.settings import from_values
from gossamer.topology import Topology, build, fits, names

COMPUTE, SLOWEST, LATENCY = "compute", "slowest worker", "latency"
BANDWIDTH, EXPOSED = "inter-node bandwidth", "exposed communication"
INSIDE = "messages inside replicas"

NEGLIGIBLE_SHARE = 0.1
"""Of a step: time lost up to here is no bottleneck."""


@dataclass(frozen=True)
class Candidate:
    method: str
    """Its name, or ``path.py[:Class]``."""
    topology: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the method, for tables."""
        return find(self.method).name

    @property
    def period(self) -> float:
        """Steps between two averagings of a worker."""
        if "rate" in self.options:
            return float(1 / self.options["rate"])
        return float(self.options.get("period", 1))

    @property
    def uses_topology(self) -> bool:
        return find(self.method).uses_topology

    @property
    def label(self) -> str:
        """The method and its settings, for tables."""
        settings = [f"{name} {value:g}" for name, value in self.options.items() if name != "period"]
        if "period" in self.options:
            settings.insert(0, f"every {self.options['period']}")
        return ", ".join([self.name, *settings])

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of ``gossamer train`` and ``gossamer.join`` for it."""
        topology = {"topology": self.topology} if self.uses_topology else {}
        return {"method": self.method, **topology, **self.options}

    def build(self, topology: Topology) -> Method:
        method = find(self.method)
        return build_method(method, from_values(method.Config, self.options), topology)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    candidate: Candidate
    workers: int
    step_s: float
    interval_s: tuple[float, float]
    """The middle nine tenths of runs."""
    no_comm_step_s: float
    """The step if communication took no time."""
    bound_by: str
    bytes_per_step: float
    memory_bytes: float
    contraction: float
    late_steps: float
    """Steps after which most of a gradient takes effect, where that is the price for equal models."""
    replica: ReplicaShape | None = None
    """What each worker consists of, if it is a replica."""

    @property
    def replica_size(self) -> int:
        return 1 if self.replica is None else self.replica.ranks

    @property
    def ranks(self) -> int:
        """How many devices compute."""
        return self.workers * self.replica_size

    @property
    def label(self) -> str:
        """Method and settings, and what is inside of replicas."""
        if self.replica is None:
            return self.candidate.label
        return f"{self.candidate.label}; {self.replica.inside.upper()} over {self.replica.ranks}"


def candidates(
    workers: int, nodes: int, methods: Sequence[str] = (), topologies: Sequence[str] = ()
) -> Iterator[Candidate]:
    """Yield all candidates for a cluster.

    ``methods``, ``topologies``: names, or files. Empty: all built-in topologies, and the methods with a closed form;
    others are replayed, which takes seconds each. A topology that does not fit the number of workers or nodes is an
    error if it is named here, and is left out otherwise.
    """
    for name in methods or [name for name, method in METHODS.items() if method in FORMS]:
        method = find(name)
        for options in method.planned_options:
            if not method.uses_topology:
                yield Candidate(name, "complete", options)
                continue
            for topology in topologies or names():
                if topologies:
                    build_topology(topology, workers, nodes)  # raises if it does not fit
                elif not fits(topology, workers, nodes):
                    continue
                yield Candidate(name, topology, options)


@lru_cache(maxsize=256)
def build_topology(name: str, workers: int, nodes: int) -> Topology:
    """Build a topology; cached, because a plan uses each many times."""
    return build(name, workers=workers, nodes=nodes)


def predict(model: ClusterModel, candidate: Candidate) -> Prediction:
    """Predict a candidate: by its method's closed form, or by running it in the virtual cluster."""
    form = FORMS.get(find(candidate.method))
    if form is None:
        # Only methods without a closed form need the virtual cluster, and torch with it.
        from gossamer.plan.runtime_model import replay

        forecast = replay.forecast(model, candidate.method, candidate.topology, candidate.options)
    else:
        topology = build_topology(candidate.topology, model.workers, model.spec.nodes)
        forecast = form(model, candidate.build(topology))
    replica = model.spec.replica
    low, high = np.quantile(forecast.step_s, (0.05, 0.95))
    return Prediction(
        candidate=candidate,
        workers=model.workers,
        step_s=float(forecast.step_s.mean()),
        interval_s=(float(low), float(high)),
        no_comm_step_s=float(forecast.no_comm_step_s.mean()),
        bound_by=bottleneck(model, forecast),
        bytes_per_step=forecast.bytes_per_step * (1 if replica is None else replica.copies),
        memory_bytes=forecast.memory_vectors * model.model_bytes * (1.0 if replica is None else replica.part),
        contraction=forecast.contraction,
        late_steps=forecast.late_steps,
        replica=replica,
    )


def bottleneck(model: ClusterModel, forecast: Forecast) -> str:
    """Return what costs a step the most time besides compute; ``COMPUTE`` if nothing costs much."""
    step_s, no_comm_s = float(forecast.step_s.mean()), float(forecast.no_comm_step_s.mean())
    if model.inner_s > NEGLIGIBLE_SHARE * step_s and model.inner_s > step_s - no_comm_s:
        return INSIDE
    waiting_s, exposed_s = max(0.0, no_comm_s - model.mean_compute_s), max(0.0, step_s - no_comm_s)
    if waiting_s + exposed_s < NEGLIGIBLE_SHARE * step_s:
        return COMPUTE
    if waiting_s >= exposed_s:
        return SLOWEST if waiting_s > NEGLIGIBLE_SHARE * step_s / 2 else COMPUTE
    comm = forecast.dominant_comm
    if comm.latency_s > comm.transfer_s:
        return LATENCY
    return BANDWIDTH if comm.crosses_nodes else EXPOSED


def ddp_step_s(model: ClusterModel) -> float:
    """Return the step time of DDP with ideal overlap: all that fits behind the backward pass is hidden there."""
    comm = model.comm.time(MEAN, model.all_workers, model.model_bytes).after_pause(model.mean_compute_s)
    compute_s = float(model.compute_s.max(axis=-1).mean())
    return compute_s + max(0.0, comm.seconds - model.spec.compute.estimated_backward_s)
