"""A model and its optimizer, seen as flat vectors.

The parameters become views of one vector. A method without a background part works on that vector itself. For one
with a background part there are two: ``weights``, which forward and backward read, and ``x``, which the method
changes at any time; they meet only at the step boundary. During the optimizer's step the parameters are views of
``x``, so what the background did is under the update; after it they are views of ``weights`` again, which has
received one copy.

Where parameters are of several dtypes the vectors are of the widest. A narrower parameter cannot be a view of them: it
keeps its own memory, is rounded from them, and what the optimizer changed in it is added to ``x``, which so keeps what
averaging gives beyond its precision. The same goes for one that would lie where a GPU cannot use it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer import memory
from gossamer.errors import InputError
from gossamer.flat import Flat


class FlatModel:
    """The vectors behind a model."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, two_vectors: bool) -> None:
        self.model, self.optimizer, self.two_vectors = model, optimizer, two_vectors
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
        self._gradient: Tensor | None = None
        self._packed = False
        viewing, rounded = self.flat.split(self.weights)
        self._viewing = [(named[part.name], part) for part in viewing]
        self._rounded = [(named[part.name], part) for part in rounded]
        self._weight_views = [part.view(self.weights) for _, part in self._viewing]
        self._x_views = [part.view(self.x) for _, part in self._viewing]
        self._show(self._weight_views)

    def _show(self, views: list[Tensor]) -> None:
        """Let the parameters be these views."""
        with torch.no_grad():
            for (parameter, _), view in zip(self._viewing, views, strict=True):
                parameter.data = view

    def enter_step(self) -> None:
        """Before the optimizer's step: it shall work on ``x``."""
        self._packed = False
        if self.two_vectors:
            self._show(self._x_views)

    def updated(self) -> None:
        """After the optimizer's update, before the method goes on with ``x``."""
        for parameter, part in self._rounded:
            view = part.view(self.x)
            # In the order of addition that gives back the parameter itself where x holds nothing beyond its precision.
            view.add_(parameter.detach().to(view.dtype) - view.to(parameter.dtype).to(view.dtype))

    def leave_step(self) -> None:
        """After the optimizer's step, once ``weights`` holds what the next gradient is taken at."""
        if self.two_vectors:
            self._show(self._weight_views)
        self._round(self.weights)

    def _round(self, vector: Tensor) -> None:
        with torch.no_grad():
            for parameter, part in self._rounded:
                parameter.copy_(part.view(vector))

    def load_weights(self, vector: Tensor) -> None:
        """Evaluate at ``vector`` from now on, until the next step ends."""
        self.weights.copy_(vector)
        self._round(self.weights)

    def buffer_vector(self) -> Tensor:
        """The floating-point buffers of the model as one vector, a copy."""
        out = torch.empty(self.buffers.size, dtype=self.buffers.dtype, device=self.device)
        return self.buffers.pack(dict(self.model.named_buffers()), out)

    def load_buffers(self, vector: Tensor) -> None:
        self.buffers.unpack(vector.to(self.device), dict(self.model.named_buffers()))

    def gradient(self) -> Tensor:
        """All gradients as one vector; zero where there is none. What is written to it reaches the optimizer."""
        if self._gradient is None:
            self._gradient = memory.zeros_like(self.x)
        if not self._packed:
            for parameter, part in zip(self.parameters, self.flat.parts, strict=True):
                view = part.view(self._gradient)
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
            self._packed = True
        return self._gradient

    def hand_over(self) -> None:
        """Give the optimizer the parameters and gradients as the method left them."""
        self._round(self.x)
        if self._packed and self._gradient is not None:
            for parameter, part in zip(self.parameters, self.flat.parts, strict=True):
                view = part.view(self._gradient)
                if parameter.grad is None:
                    parameter.grad = view.to(parameter.dtype, copy=True)
                else:
                    parameter.grad.copy_(view)

    def no_update(self) -> None:
        """Let the optimizer's step do nothing: every torch optimizer passes over parameters without a gradient."""
        for parameter in self.parameters:
            parameter.grad = None
