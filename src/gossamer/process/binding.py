"""A model and its optimizer, seen as flat vectors.

The parameters become views of one vector. A method without a background part works on that vector itself. For one
with a background part there are two: ``weights``, which forward and backward read, and ``x``, which the method
changes at any time; they meet only at the step boundary. During the optimizer's step the parameters are views of
``x``, so what the background did is under the update; after it they are views of ``weights`` again, which has
received one copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.errors import InputError
from gossamer.flat import Flat


class Binding:
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
        self.weights = torch.empty(self.flat.size, dtype=self.flat.dtype, device=self.device)
        self.flat.pack(dict(named), self.weights)
        if any(part.dtype != self.flat.dtype for part in self.flat.parts):
            raise InputError(
                "the parameters are of several dtypes: expected one; keep them in float32 and use autocast"
            )
        self.x = self.weights.clone() if two_vectors else self.weights
        self._gradient: Tensor | None = None
        self._packed = False
        self._weight_views = self._views(self.weights)
        self._x_views = self._views(self.x)
        self.show(self._weight_views)

    def _views(self, vector: Tensor) -> list[Tensor]:
        return [part.view(vector) for part in self.flat.parts]

    def show(self, views: list[Tensor]) -> None:
        """Let the parameters be these views."""
        with torch.no_grad():
            for parameter, view in zip(self.parameters, views, strict=True):
                parameter.data = view

    def enter_step(self) -> None:
        """Before the optimizer's step: it shall work on ``x``."""
        self._packed = False
        if self.two_vectors:
            self.show(self._x_views)

    def leave_step(self) -> None:
        """After the optimizer's step, once ``weights`` holds what the next gradient is taken at."""
        if self.two_vectors:
            self.show(self._weight_views)

    def gradient(self) -> Tensor:
        """All gradients as one vector; zero where there is none. What is written to it reaches the optimizer."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.x)
        if not self._packed:
            for parameter, part in zip(self.parameters, self.flat.parts, strict=True):
                view = part.view(self._gradient)
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
            self._packed = True
        return self._gradient

    def hand_over_gradient(self) -> None:
        """Give the optimizer the gradients as the method left them."""
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
