"""A model and its optimizer as flat vectors.

The parameters become views of one vector, so a method without a background part works on the parameters themselves.
For a method with a background part there are two vectors: ``weights``, which forward and backward read, and ``x``,
which the method changes at any time. They meet at the step boundary only, so weights are never torn. During the
optimizer's step the parameters are views of ``x``: the update lands on top of what the background did. After the step
``weights`` receives one copy of ``x`` and the parameters are views of it again.

If parameters have several dtypes, the vectors have the widest. A narrower parameter cannot be a view of them. It keeps
its own memory and is rounded from ``x``; what the optimizer changes in it is added to ``x``, which so keeps the
precision that averaging gains. The same goes for a parameter that would start at an address a GPU cannot use.

Of a DTensor (FSDP2, tensor parallel) the local part is in the vector. It keeps its own memory too: what shards a model
has its own buffers of it. It is copied in and out at each step, so a change by the user between steps counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import InputError, unknown
from gossamer.vectors import memory
from gossamer.vectors.flat import Flat, as_part_of, is_sharded, local_part
from gossamer.vectors.vector_math import equal


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer without what ``torch.compile`` adds: some workers may compile."""
    return name.replace("_orig_mod.", "")


def _kinds(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}


class FlatModel:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, two_vectors: bool) -> None:
        self.model, self.optimizer, self.two_vectors = model, optimizer, two_vectors
        self.reshard()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.flat = Flat.of_parameters(model)
        self.parameters = [named[part.name] for part in self.flat.parts]
        devices = {p.device for p in self.parameters}
        if len(devices) > 1:
            raise InputError(f"the model is spread over {len(devices)} devices: expected one device per worker")
        (self.device,) = devices
        self.weights = memory.zeros(self.flat.size, self.flat.dtype, self.device)
        self.flat.pack(dict(named), self.weights)
        self.x = self.weights
        if two_vectors:
            self.x = memory.zeros_like(self.weights).copy_(self.weights)
        self.buffers = Flat.of_buffers(model)
        self._buffer_kinds = _kinds(model)
        self._start_buffers: tuple[Tensor, Tensor] | None = None
        self._gradient: Tensor | None = None
        self.gradient_packed = False
        """The vector holds the gradients of the step in progress."""
        viewed, rounded = self.flat.split(self.weights)
        sharded = {part.name for part in self.flat.parts if is_sharded(named[part.name])}
        rounded += [part for part in viewed if part.name in sharded]
        viewed = [part for part in viewed if part.name not in sharded]
        self._sharded = [(named[part.name], part) for part in self.flat.parts if part.name in sharded]
        self.viewed = [(named[part.name], part) for part in viewed]
        self._rounded = [(named[part.name], part) for part in rounded]
        self.weight_views = [part.view(self.weights) for _, part in self.viewed]
        self._x_views = [part.view(self.x) for _, part in self.viewed]
        self._point_parameters_at(self.weight_views)

    def _point_parameters_at(self, views: list[Tensor]) -> None:
        with torch.no_grad():
            for (parameter, _), view in zip(self.viewed, views, strict=True):
                parameter.data = view

    def release(self) -> None:
        """Give every parameter memory of its own again, after the training.

        Libraries that save models (safetensors, Accelerate) refuse or drop tensors that share one storage.
        """
        self._point_parameters_at([view.clone() for view in self.weight_views])

    def reshard(self) -> None:
        """Let FSDP2 drop the whole parameters that it keeps between passes: they do not follow their parts."""
        for module in self.model.modules():
            reshard = getattr(module, "reshard", None)
            if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__) and callable(reshard):
                reshard()

    def adopt_sharded(self) -> None:
        """Take over what the user has changed in the parts of DTensors since we wrote them."""
        for parameter, part in self._sharded:
            local, weights = local_part(parameter), part.view(self.weights)
            if local.dtype == weights.dtype and not self.two_vectors:
                weights.copy_(local)
                continue
            change = local.to(weights.dtype) - weights.to(local.dtype).to(weights.dtype)
            weights.add_(change)
            if self.two_vectors:
                part.view(self.x).add_(change)

    def sharded_changed(self) -> bool:
        """Return whether the user has changed parts of DTensors since we wrote them."""
        pairs = ((local_part(parameter), part.view(self.weights)) for parameter, part in self._sharded)
        return any(not torch.equal(local, weights.to(local.dtype)) for local, weights in pairs)

    def enter_step(self) -> None:
        """Before the optimizer's step: make it work on ``x``."""
        self.gradient_packed = False
        self.adopt_sharded()
        if self.two_vectors:
            self._point_parameters_at(self._x_views)

    def after_update(self) -> None:
        """After the optimizer's update: add what it changed in rounded parameters to ``x``."""
        for parameter, part in self._rounded:
            view, now = part.view(self.x), local_part(parameter)
            if now.dtype == view.dtype:
                view.copy_(now)
                continue
            # This order of additions gives the parameter itself where x holds nothing beyond its precision.
            view.add_(now.to(view.dtype) - view.to(now.dtype).to(view.dtype))

    def leave_step(self) -> None:
        """After the optimizer's step, once ``weights`` holds the point of the next gradient."""
        if self.two_vectors:
            self._point_parameters_at(self.weight_views)
        self.round_parameters()

    def round_parameters(self) -> None:
        """Round the parameters that are not views of ``weights`` from it."""
        self._round_parameters(self.weights)

    def _round_parameters(self, vector: Tensor) -> None:
        with torch.no_grad():
            for parameter, part in self._rounded:
                local_part(parameter).copy_(part.view(vector))

    def load_weights(self, vector: Tensor) -> None:
        """Evaluate the model at ``vector`` until the next step ends."""
        self.weights.copy_(vector)
        self._round_parameters(self.weights)
        if self._sharded:
            self.reshard()

    def buffer_vector(self) -> Tensor:
        """Return a copy of the model's floating-point buffers as one vector."""
        out = torch.empty(self.buffers.size, dtype=self.buffers.dtype, device=self.device)
        return self.buffers.pack(dict(self.model.named_buffers()), out)

    def load_buffers(self, vector: Tensor) -> None:
        self.buffers.unpack(vector.to(self.device), dict(self.model.named_buffers()))

    def check_buffers(self) -> list[str]:
        """Return the names of buffers that were added after join. InputError if others are gone or have changed."""
        now = _kinds(self.model)
        for name, (shape, dtype) in self._buffer_kinds.items():
            if now.get(name) != (shape, dtype):
                is_now = f"{tuple(now[name][0])} {now[name][1]}" if name in now else "gone"
                raise InputError(
                    f"the buffer {plain_name(name)} was {tuple(shape)} {dtype} at join and is {is_now} now, "
                    "so it cannot be averaged: give all buffers their final shape before join"
                )
        return [plain_name(name) for name in now if name not in self._buffer_kinds]

    def note_start_buffers(self) -> None:
        """Remember where the buffers are not finite at the start: a mask of −inf is meant to be so."""
        vector = self.buffer_vector().to("cpu")
        places = vector.isfinite().logical_not_().nonzero().flatten()
        self._start_buffers = (places, vector[places]) if len(places) else None

    def without_start_values(self, vector: Tensor) -> Tensor:
        """Return a buffer vector in host memory with zeros where it is not finite, and was so at the start."""
        if self._start_buffers is None:
            return vector
        places, values = self._start_buffers
        now = vector[places]
        same = (now == values) | (now.isnan() & values.isnan())
        return vector.index_fill(0, places[same], 0.0)

    def exact_buffer_vector(self) -> Tensor:
        """Return the bytes of the buffers that are no floating-point numbers, such as counts, as numbers."""
        flat = [buffer.detach().contiguous().flatten().view(torch.uint8) for buffer in self._exact_buffers()]
        return torch.cat([torch.empty(0, dtype=torch.uint8, device=self.device), *flat]).to(torch.float32)

    def load_exact_buffers(self, vector: Tensor) -> None:
        """Load what ``exact_buffer_vector`` returned."""
        start, data = 0, vector.to(self.device, torch.uint8)
        with torch.no_grad():
            for buffer in self._exact_buffers():
                end = start + buffer.nbytes
                # A copy: a buffer's type may need an address that is a multiple of its length.
                buffer.copy_(data[start:end].clone().view(buffer.dtype).view(buffer.shape))
                start = end

    def _exact_buffers(self) -> list[Tensor]:
        return [b for b in self.model.buffers() if not b.is_floating_point() and b.numel()]

    def gradient(self) -> Tensor:
        """Return all gradients as one vector, zero for parameters without one. The optimizer gets what is written to
        it."""
        if not self.gradient_packed:
            for index in range(len(self.parameters)):
                self.pack_gradient(index)
            self.gradient_packed = True
        return self.gradient_buffer()

    def add_gradient(self, vector: Tensor) -> None:
        """Add all gradients to ``vector``."""
        if self.gradient_packed:
            # A method may have written to it.
            vector.add_(self.gradient_buffer())
            return
        for parameter, part in zip(self.parameters, self.flat.parts, strict=True):
            if parameter.grad is not None:
                part.view(vector).add_(local_gradient(parameter))

    def gradient_buffer(self) -> Tensor:
        """Return the vector of gradients, whatever it holds."""
        if self._gradient is None:
            self._gradient = memory.zeros_like(self.x)
        return self._gradient

    def pack_gradient(self, index: int) -> None:
        """Copy the gradient of one parameter into the vector."""
        parameter, view = self.parameters[index], self.flat.parts[index].view(self.gradient_buffer())
        if parameter.grad is None:
            view.zero_()
        else:
            view.copy_(local_gradient(parameter))

    def are_packed(self, indices: Iterable[int]) -> bool:
        """Return whether the gradients of these parameters are what the vector holds, and no NaN is among them."""
        for index in indices:
            parameter, view = self.parameters[index], self.flat.parts[index].view(self.gradient_buffer())
            if parameter.grad is None or not equal(view, local_gradient(parameter).to(view.dtype)):
                return False
        return True

    def before_update(self, gradient: Tensor | None = None) -> None:
        """Before the optimizer's update: give it the parameters and gradients as the method left them.

        ``gradient``: the gradients as one vector; None: that of ``gradient()``, if the method has used it.
        """
        self._round_parameters(self.x)
        gradient = self._gradient if gradient is None and self.gradient_packed else gradient
        if gradient is not None:
            for parameter, part in zip(self.parameters, self.flat.parts, strict=True):
                view = part.view(gradient)
                if parameter.grad is None and not parameter.requires_grad:
                    continue  # frozen after join
                if parameter.grad is None:
                    parameter.grad = as_part_of(view.to(parameter.dtype, copy=True), parameter)
                else:
                    local_part(parameter.grad).copy_(view)

    def read_optimizer_state(self, name: str) -> Tensor:
        """Return the optimizer's state ``name`` of all parameters as one vector, zero where it has none yet."""
        out = torch.zeros_like(self.x)
        for state, view in self._optimizer_states(name, out):
            view.copy_(state)
        return out

    def write_optimizer_state(self, name: str, value: Tensor) -> None:
        for state, view in self._optimizer_states(name, value):
            state.copy_(view)

    def _optimizer_states(self, name: str, vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the state ``name`` of each parameter that has it, and the part of ``vector`` that belongs to it."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        if any(states) and not any(isinstance(state.get(name), Tensor) for state in states):
            known = sorted({key for state in states for key, value in state.items() if isinstance(value, Tensor)})
            raise unknown(f"state of {type(self.optimizer).__name__}", name, known)
        for state, part in zip(states, self.flat.parts, strict=True):
            if isinstance(state.get(name), Tensor):
                yield local_part(state[name]), part.view(vector)

    def skip_update(self) -> None:
        """Make the optimizer's step do nothing: every torch optimizer skips parameters without a gradient."""
        for parameter in self.parameters:
            parameter.grad = None


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this process's part of a parameter's gradient.

    The gradient of a DTensor may be laid out otherwise than the parameter, as terms of a sum. Then it is brought into
    the parameter's layout first, which all ranks of the replica do at the same step.
    """
    gradient: Any = parameter.grad
    if is_sharded(gradient) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        parameter.grad = gradient
    return local_part(gradient)
