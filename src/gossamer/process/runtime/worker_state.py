"""The state of a worker: what its threads share, what a checkpoint keeps, what a joining worker takes over."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Mean, Shifted, Ticket
from gossamer.errors import InputError
from gossamer.methods import Method
from gossamer.process.averages.step_history import StepHistory
from gossamer.process.collectives.membership import FOREGROUND
from gossamer.process.events import EventKind, Events
from gossamer.process.lifecycle import CommAborted, Lifecycle
from gossamer.process.metrics import Metrics
from gossamer.process.replica.agreement import Agreement
from gossamer.process.roster.placement import place
from gossamer.process.roster.roster import KnownRoster, Roster
from gossamer.process.runtime.flat_model import FlatModel, plain_name
from gossamer.process.runtime.process_worker import ProcessWorker
from gossamer.process.runtime.staging import Staging
from gossamer.process.state.lineage import ROOT, Lineage, ViewId
from gossamer.process.watches.weight_watch import WeightWatch
from gossamer.topology import Topology
from gossamer.vectors.flat import as_part_of, local_part


class WorkerState:
    """One worker's vectors, scalars, counts and communication in flight (a ``TransferableState``)."""

    def __init__(
        self,
        method: Method,
        flat_model: FlatModel,
        worker: ProcessWorker,
        staging: Staging,
        roster: KnownRoster,
        first_topology: Topology,
    ) -> None:
        """``first_topology``: that with which the run began."""
        self.roster, self._first_topology = roster, first_topology
        self.on_placed: Callable[[], None] = lambda: None
        """Called when this worker has got a new place among the workers of the run."""
        self.method, self.flat_model, self.worker, self.staging = method, flat_model, worker, staging
        self.lifecycle, self.metrics = Lifecycle(), Metrics()
        self.lock = threading.RLock()
        """Held by the thread that works on ``x``: the training's during a step, the background's while it merges."""
        self.in_flight: dict[Ticket, Future[Any]] = {}
        self.in_step = False
        """The optimizer's step is in progress: ``weights`` are written when it ends."""
        self.needs_state = False
        """This worker has just joined and has no state of the run yet."""
        self.nonfinite = False
        """This worker has sent a vector that is not finite, and needs the others' state."""
        self.stale_gradient = False
        """The gradient in progress is taken at weights that have been replaced since."""
        self.taken_from: int | None = None
        """The worker whose state this one took over last."""
        self.taken_at = 0
        """At which of its steps."""
        self.replica: Agreement | None = None
        """If this worker is a rank of a replica: how it agrees with the others."""
        self.data_position: tuple[int, int] | None = None
        """Epoch and batch that the user's loop is at (``process/data``); right after joining, that of a peer."""
        self.averaging = False
        """The model shows the mean of all workers: inside ``Swarm.averaged``."""
        self._process_id = os.getpid()
        self.lineage: Lineage | None = None
        """Which steps are in this worker's model, if the workers are in lockstep."""
        self.events = Events(worker.run_rank)
        self.watch = WeightWatch(flat_model, self.events)
        self.history = StepHistory()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the worker's: it has none of its threads."""
        return os.getpid() != self._process_id

    def check_may_step(self) -> None:
        """InputError if a step now would be lost."""
        if self.worker.run_rank not in self.roster:
            raise InputError(
                f"the others have given up rank {self.worker.run_rank} for good, while this worker could not be "
                'reached: start it again with join(…, at="HOST:PORT"), and it gets a place of its own'
            )
        if self.forked:
            raise InputError(
                "this process was forked from a worker after join, and is none itself: train in the process that "
                "called join, or call join in this one, after the fork"
            )
        if self.averaging:
            raise InputError(
                "optimizer.step() inside swarm.averaged(): the block shows the mean model, and each worker gets its "
                "own back at the end of it: evaluate inside, train outside"
            )

    # State transfer (collectives/state_transfer.py)

    def position(self, channel: str) -> int:
        if self.needs_state or self.nonfinite:
            return -1
        # A membership that the background rebuilds has no step that could be void, so nobody in it is behind.
        return self.worker.step if channel == FOREGROUND else 0

    @property
    def lockstep(self) -> bool:
        return self.method.lockstep

    def checksum(self) -> float:
        return float(self.flat_model.x.double().sum())

    def count_step(self, view: ViewId, workers: int) -> None:
        """Note that a step was made by the workers of a view."""
        if self.method.lockstep and workers:
            self.lineage = (self.lineage or ROOT).after_step(view, workers)

    def on_merge(self, text: str) -> None:
        self.events.add(EventKind.MERGED, text)

    def on_discard(self, steps: int, text: str) -> None:
        self.metrics.discarded += steps
        self.events.add(EventKind.DISCARDED, text)

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        with self.lock, self.staging.on_training_stream():
            tensors = {"x": self.flat_model.x}
            tensors |= {f"buffer/{name}": buffer for name, buffer in self._buffers().items()}
            vectors = self.worker.vectors
            tensors |= {f"vector/{name}": vectors[name] for name in self.method.shared if name in vectors}
            rest: dict[str, Any] = {
                "rank": self.worker.run_rank,
                "step": self.worker.step,
                "scalars": {name: value for name, value in self.worker.scalars.items() if name in self.method.shared},
                "optimizer": {},
                "data": self.data_position,
            }
            if self.method.lockstep:
                # All workers are at the same step: a peer's moments fit its weights.
                for index, name, value in self._optimizer_state():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer/{index}/{name}"] = local_part(value)
                    else:
                        rest["optimizer"][f"{index}/{name}"] = value
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, rest

    def import_state(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        if tensors["x"].shape != self.flat_model.x.shape:
            raise InputError(
                f"the others' model has {tensors['x'].numel()} trainable parameters and that of worker "
                f"{self.worker.run_rank} {self.flat_model.x.numel()}: expected the same model on all workers"
            )
        with self.lock, self.staging.on_training_stream():
            begins_anew = self.nonfinite or self.needs_state
            if self.needs_state and self.method.lockstep and rest["data"] is not None:
                self.data_position = (rest["data"][0], rest["data"][1])
            if begins_anew:
                self._forget()
            if self.nonfinite:
                # Workers in lockstep take over within a step, which is void anyway.
                self.stale_gradient = not self.method.lockstep
            self.flat_model.x.copy_(tensors["x"])
            for name, tensor in tensors.items():
                kind, _, key = name.partition("/")
                if kind == "buffer":
                    self._buffers()[key].copy_(tensor)
                elif kind == "vector":
                    self.worker.vector(key, len(tensor)).copy_(tensor)
                elif kind == "optimizer":
                    self._load_optimizer_entry(key, tensor)
            for key, value in rest["optimizer"].items():
                self._load_optimizer_entry(key, value)
            self.worker.scalars.update(rest["scalars"])
            if self.method.lockstep:
                self.worker.step = rest["step"]
            if self.nonfinite:
                self.method.begin(self.worker)
            self.needs_state = self.nonfinite = False
            self.taken_from, self.taken_at = rest.get("rank"), rest["step"]
            if rest["step"]:
                # Otherwise it is the state from before the training.
                self.history.touch(time.monotonic())
            if not self.in_step:
                self.write_eval_point()

    def write_eval_point(self) -> None:
        """Write the parameters of the next gradient into ``weights``."""
        if self.method.eval_point is not None:
            self.method.eval_point(self.worker, self.flat_model.weights)
        elif self.flat_model.two_vectors:
            self.flat_model.weights.copy_(self.flat_model.x)
        self.flat_model.round_parameters()
        self.watch.written()

    def _forget(self) -> None:
        """Drop the method's state and the optimizer's moments: they belong to weights that are replaced."""
        state = self.flat_model.optimizer.state
        for index, _, value in self._optimizer_state():
            if isinstance(value, Tensor) and value.dim() and not value.is_floating_point():
                # Moments in 8 bits, with a table of what they mean: the optimizer begins anew where it has no state.
                state.pop(self.flat_model.parameters[index], None)
        moments = [value for _, _, value in self._optimizer_state() if isinstance(value, Tensor) and value.dim()]
        for tensor in (*self.worker.vectors.values(), *moments):
            tensor.zero_()
        self.worker.scalars.clear()
        self.worker.tickets.clear()

    def on_membership_change(self, roster: Roster | None = None) -> None:
        self.events.add(EventKind.REBUILT, "the group was rebuilt")
        with self.lock:
            self.in_flight.clear()
            self.method.on_membership_change(self.worker)
            self.follow(self.roster.value if roster is None else roster)

    def follow(self, roster: Roster) -> None:
        """Take this worker's place among those of the roster: topology, neighbours and constants follow."""
        if roster.ranks == self.worker.placement.ranks or self.worker.run_rank not in roster.ranks:
            return
        placement = place(self._first_topology, roster.ranks)
        with self.lock:
            self.worker.place(placement)
            self.method.on_topology_change(placement.topology)
        self.on_placed()
        self.events.add(EventKind.RESIZED, placement.describe())

    def _buffers(self) -> dict[str, Tensor]:
        return {plain_name(name): buffer for name, buffer in self.flat_model.model.named_buffers()}

    def _optimizer_state(self) -> list[tuple[int, str, Any]]:
        """Return the optimizer's state as (parameter index, name, value)."""
        state = self.flat_model.optimizer.state
        return [
            (index, name, value)
            for index, parameter in enumerate(self.flat_model.parameters)
            for name, value in sorted(state.get(parameter, {}).items())
            if value is None or isinstance(value, Tensor | int | float | bool | str)
        ]

    def _load_optimizer_entry(self, key: str, value: Any) -> None:
        """Set one entry of the optimizer's state; ``key`` is PARAMETER_INDEX/NAME."""
        index, name = key.split("/", 1)
        parameter = self.flat_model.parameters[int(index)]
        entry = self.flat_model.optimizer.state[parameter]
        current = entry.get(name)
        if not isinstance(value, Tensor):
            entry[name] = value
        elif isinstance(current, Tensor) and local_part(current).shape == value.shape:
            local_part(current).copy_(value)
        elif value.dim() == 0:
            # Torch keeps step counts in host memory and everything else on the parameter's device.
            entry[name] = value.clone()
        else:
            moved = value.to(parameter.device, copy=True)
            entry[name] = as_part_of(moved, parameter) if moved.shape == local_part(parameter).shape else moved

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return tensors (copies in host memory) and JSON data in nested dictionaries."""
        in_flight = self._drain_in_flight()
        with self.lock:
            return {
                "method": self.method.name,
                "rank": self.worker.run_rank,
                "workers": self.worker.num_workers,
                "step": self.worker.step,
                "x": _host_copy(self.flat_model.x),
                "buffers": {name: _host_copy(buffer) for name, buffer in self._buffers().items()},
                "vectors": {name: _host_copy(vector) for name, vector in self.worker.vectors.items()},
                "scalars": dict(self.worker.scalars),
                "rng": self.worker.rng.bit_generator.state,
                "tickets": sorted(self.worker.tickets),
                "in_flight": in_flight,
            }

    def _drain_in_flight(self) -> dict[str, Any]:
        """Wait for the communication in flight and return its answers, except those lost with their generation."""
        answers: dict[str, Any] = {}
        for name, ticket in list(self.worker.tickets.items()):
            try:
                answer = self.in_flight[ticket].result()
            except (CommAborted, KeyError):
                continue
            answers[name] = encode_answer(answer)
        return answers

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, own in (("method", self.method.name), ("workers", self.worker.num_workers)):
            if state.get(name) != own:
                raise InputError(f"this state is of a run with {name} {state.get(name)!r}, not {own!r}")
        if len(state["x"]) != len(self.flat_model.x):
            raise InputError(
                f"this state is of a model with {len(state['x'])} trainable parameters, this one has "
                f"{len(self.flat_model.x)}: load the state of the same model"
            )
        with self.lock:
            worker = self.worker
            self.flat_model.x.copy_(state["x"])
            for name, buffer in self._buffers().items():
                buffer.copy_(state["buffers"][name])
            for name, vector in state["vectors"].items():
                worker.vector(name, len(vector)).copy_(vector)
            worker.scalars.clear()
            worker.scalars.update(state["scalars"])
            worker.step = state["step"]
            self.history.touch(time.monotonic())
            worker.rng.bit_generator.state = state["rng"]
            worker.tickets.clear()
            self.in_flight.clear()
            for name, answer in state["in_flight"].items():
                self._restore_in_flight(name, answer)
            if sorted(worker.tickets) != state["tickets"]:
                self.method.on_membership_change(worker)
            self.write_eval_point()

    def _restore_in_flight(self, name: str, saved: dict[str, Any]) -> None:
        """Recreate a communication in flight whose answer has already arrived."""
        answer = decode_answer(saved, self.flat_model.device)
        future: Future[Any] = Future()
        future.set_result(answer)
        ticket = Ticket(Mean(self.flat_model.x, round=self.worker.step), since_step=self.worker.step)
        self.worker.tickets[name] = ticket
        self.in_flight[ticket] = future


def encode_answer(answer: Any) -> dict[str, Any]:
    """Return the answer to a communication as tensors (copies in host memory) and JSON data."""
    if isinstance(answer, Tensor):
        return {"tensor": _host_copy(answer)}
    if isinstance(answer, list):
        gathered = {str(at): _host_copy(tensor) for at, tensor in enumerate(t for ts in answer for t in ts)}
        return {"gathered": gathered, "of": len(answer)}
    if answer is None:
        return {}
    vector, scalars, *delivered = answer
    tensor = {} if vector is None else {"tensor": _host_copy(vector)}
    return {**tensor, "scalars": list(scalars), **({"delivered": delivered[0]} if delivered else {})}


def decode_answer(saved: dict[str, Any], device: torch.device) -> Any:
    """Return the answer that ``encode_answer`` encoded."""
    if "gathered" in saved:
        tensors = [tensor.to(device) for tensor in saved["gathered"].values()]
        per_worker = len(tensors) // saved["of"]
        return [tuple(tensors[at : at + per_worker]) for at in range(0, len(tensors), per_worker)]
    vector = saved["tensor"].to(device) if "tensor" in saved else None
    if "delivered" in saved:
        return Shifted(vector, tuple(saved["scalars"]), saved["delivered"])
    return (vector, tuple(saved["scalars"])) if "scalars" in saved else vector


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite, in one pass."""
    return isfinite(float(tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)))


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
