"""Everything a worker is: what a checkpoint keeps, and what one that joins takes over from the others."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import Gather, Mean, Ticket
from gossamer.errors import InputError
from gossamer.methods import Method
from gossamer.process.collectives.membership import FOREGROUND, CommAborted
from gossamer.process.runtime.flat_model import FlatModel
from gossamer.process.runtime.process_worker import ProcessWorker


class WorkerState:
    """One worker's vectors, scalars, counts and what it has under way (a ``groups.State``)."""

    def __init__(self, method: Method, flat_model: FlatModel, worker: ProcessWorker) -> None:
        self.method, self.flat_model, self.worker = method, flat_model, worker
        self.lock = threading.RLock()
        """Held by whoever works on ``x``."""
        self.under_way: dict[Ticket, Future[Any]] = {}
        self.needs_state = False
        """This worker has nothing of the run yet."""
        self.nonfinite = False
        """This worker has sent what is not finite, and needs the others' state."""
        self.events: list[str] = []
        self.stale_gradient = False
        """The gradient under way was taken at weights that were not finite."""

    # What one that is behind takes over

    def position(self, channel: str) -> int:
        if self.needs_state or self.nonfinite:
            return -1
        # Beside the training nobody is behind: there is no step that could be void.
        return self.worker.step if channel == FOREGROUND else 0

    def portable(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        shared = [name for name in self.method.shared if name in self.method.shared_vectors]
        with self.lock:
            tensors = {"x": self.flat_model.x}
            tensors |= {f"buffer/{name}": buffer for name, buffer in self._buffers().items()}
            tensors |= {f"vector/{name}": self.worker.vector(name) for name in shared}
            facts: dict[str, Any] = {
                "step": self.worker.step,
                "scalars": {name: value for name, value in self.worker.scalars.items() if name in self.method.shared},
                "optimizer": {},
            }
            if self.method.same_updates:
                for index, name, value in self._optimizer_state():
                    if isinstance(value, Tensor):
                        tensors[f"optimizer/{index}/{name}"] = value
                    else:
                        facts["optimizer"][f"{index}/{name}"] = value
            return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}, facts

    def take(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        if tensors["x"].shape != self.flat_model.x.shape:
            raise InputError(
                f"the others' model has {tensors['x'].numel()} trainable parameters and worker {self.worker.rank}'s "
                f"{self.flat_model.x.numel()}: expected the same model on all workers"
            )
        with self.lock:
            if self.nonfinite:
                self.begin_again()
                # Where workers wait for each other they take over within a step, and that is void anyway.
                self.nonfinite, self.stale_gradient = False, not self.method.lockstep
            self.flat_model.x.copy_(tensors["x"])
            for name, tensor in tensors.items():
                kind, _, rest = name.partition("/")
                if kind == "buffer":
                    self._buffers()[rest].copy_(tensor)
                elif kind == "vector":
                    self.worker.vector(rest).copy_(tensor)
                elif kind == "optimizer":
                    self._take_optimizer_state(rest, tensor)
            for name, value in facts["optimizer"].items():
                self._take_optimizer_state(name, value)
            self.worker.scalars.update(facts["scalars"])
            if self.method.lockstep:
                self.worker.step = facts["step"]
            self.flat_model.load_weights(self.flat_model.x)
            self.needs_state = False

    def begin_again(self) -> None:
        """Others' weights take the place of ours: what ours left behind, in the optimizer too, begins at zero."""
        moments = [value for _, _, value in self._optimizer_state() if isinstance(value, Tensor) and value.dim()]
        for tensor in (*self.worker.vectors.values(), *moments):
            tensor.zero_()

    def on_membership_change(self) -> None:
        self.events.append("the group was rebuilt")
        with self.lock:
            self.under_way.clear()
            self.method.on_membership_change(self.worker)

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self.flat_model.model.named_buffers())

    def _optimizer_state(self) -> list[tuple[int, str, Any]]:
        state = self.flat_model.optimizer.state
        return [
            (index, name, value)
            for index, parameter in enumerate(self.flat_model.parameters)
            for name, value in sorted(state.get(parameter, {}).items())
            if value is None or isinstance(value, Tensor | int | float | bool | str)
        ]

    def _take_optimizer_state(self, key: str, value: Any) -> None:
        index, name = key.split("/", 1)
        parameter = self.flat_model.parameters[int(index)]
        entry = self.flat_model.optimizer.state[parameter]
        held = entry.get(name)
        if not isinstance(value, Tensor):
            entry[name] = value
        elif isinstance(held, Tensor) and held.shape == value.shape:
            held.copy_(value)
        else:
            # Step counts lie in host memory, as torch has them; all else beside the parameter.
            entry[name] = value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)

    # What a checkpoint keeps

    def state_dict(self) -> dict[str, Any]:
        """Tensors (copies, in host memory) and what JSON can hold, in nested dictionaries."""
        in_flight = self._drained()
        with self.lock:
            return {
                "method": self.method.name,
                "rank": self.worker.rank,
                "workers": self.worker.num_workers,
                "step": self.worker.step,
                "x": _kept(self.flat_model.x),
                "buffers": {name: _kept(buffer) for name, buffer in self._buffers().items()},
                "vectors": {name: _kept(vector) for name, vector in self.worker.vectors.items()},
                "scalars": dict(self.worker.scalars),
                "rng": self.worker.rng.bit_generator.state,
                "tickets": sorted(self.worker.tickets),
                "in_flight": in_flight,
            }

    def _drained(self) -> dict[str, Any]:
        """The answers to what is under way, waited for; without those that were lost with their group."""
        drained: dict[str, Any] = {}
        for name, ticket in list(self.worker.tickets.items()):
            try:
                answer = self.under_way[ticket].result()
            except (CommAborted, KeyError):
                continue
            if isinstance(answer, Tensor):
                drained[name] = {"mean": _kept(answer)}
            else:
                gathered = {str(at): _kept(tensor) for at, tensor in enumerate(t for ts in answer for t in ts)}
                drained[name] = {"gathered": gathered, "of": len(answer)}
        return drained

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        for name, mine in (("method", self.method.name), ("workers", self.worker.num_workers)):
            if state.get(name) != mine:
                raise InputError(f"this state is of a run with {name} {state.get(name)!r}, not {mine!r}")
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
            worker.rng.bit_generator.state = state["rng"]
            worker.tickets.clear()
            self.under_way.clear()
            for name, kept in state["in_flight"].items():
                self._restore(name, kept)
            if sorted(worker.tickets) != state["tickets"]:
                self.method.on_membership_change(worker)
            if self.flat_model.two_vectors:
                self.method.eval_point(worker, self.flat_model.weights)
            self.flat_model.load_weights(self.flat_model.weights)

    def _restore(self, name: str, kept: dict[str, Any]) -> None:
        """Let a communication be under way whose answer is there already."""
        device = self.flat_model.device
        answer: Any
        if "mean" in kept:
            answer = kept["mean"].to(device)
            ticket = Ticket(Mean(answer, round=self.worker.step))
        else:
            tensors = [tensor.to(device) for tensor in kept["gathered"].values()]
            each = len(tensors) // kept["of"]
            answer = [tuple(tensors[at : at + each]) for at in range(0, len(tensors), each)]
            ticket = Ticket(Gather(answer[0], round=self.worker.step))
        done: Future[Any] = Future()
        done.set_result(answer)
        self.worker.tickets[name] = ticket
        self.under_way[ticket] = done


def is_finite(tensor: Tensor) -> bool:
    """Whether all of a vector is finite; in one pass over it."""
    return isfinite(float(tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)))


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
