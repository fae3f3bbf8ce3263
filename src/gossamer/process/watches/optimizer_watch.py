"""Notices when the optimizer that was joined trains something else than the parameters that were joined.

A parameter that is added to the optimizer later, or was frozen at ``join`` and is trained now, is no part of the flat
vector: each worker would train its own. Steps without any gradient train nothing.
"""

from __future__ import annotations

from torch import Tensor

from gossamer.errors import InputError
from gossamer.process.events import EventKind, Events
from gossamer.process.runtime.flat_model import FlatModel, plain_name

TOLERATED = 10
"""Steps in a row without any gradient, after which this is said."""


class OptimizerWatch:
    """Watches what the optimizer of one worker is about to train."""

    def __init__(self, flat_model: FlatModel, events: Events) -> None:
        self._flat_model, self._events = flat_model, events
        self._joined = {id(parameter) for parameter in flat_model.parameters}
        self._num_held = self._count()
        self._frozen = [p for p in self._held() if id(p) not in self._joined]
        """Parameters of the optimizer that were frozen at ``join``."""
        self._num_without_gradient = 0

    def _held(self) -> list[Tensor]:
        return [p for group in self._flat_model.optimizer.param_groups for p in group["params"]]

    def _count(self) -> int:
        return sum([len(group["params"]) for group in self._flat_model.optimizer.param_groups])

    def before_step(self) -> None:
        """InputError if the step would train what workers do not share. Costs little while nothing changes."""
        if self._count() != self._num_held:
            self._check_held()
        for parameter in self._frozen:
            if parameter.grad is not None and parameter.requires_grad:
                raise InputError(f"{self._name(parameter)} was frozen at join and is trained now{_REMEDY}")
        if any(parameter.grad is not None for parameter in self._flat_model.parameters):
            self._num_without_gradient = 0
            return
        self._num_without_gradient += 1
        if self._num_without_gradient == TOLERATED:
            text = (
                f"{TOLERATED} steps in a row without any gradient, so nothing is trained: call loss.backward() before "
                "optimizer.step(), and zero_grad() after it, with the model that was given to join"
            )
            self._events.add(EventKind.NO_GRADIENT, text)

    def _check_held(self) -> None:
        """Parameters were added to the optimizer, or taken away."""
        held = self._held()
        added = [p for p in held if id(p) not in self._joined and p.requires_grad]
        if added:
            raise InputError(f"{self._name(added[0])} was added to the optimizer after join{_REMEDY}")
        missing = self._joined - {id(p) for p in held}
        if missing:
            lost = next(p for p in self._flat_model.parameters if id(p) in missing)
            raise InputError(
                f"{self._name(lost)} was removed from the optimizer after join: set requires_grad=False on it instead"
            )
        self._num_held = len(held)
        self._frozen = [p for p in held if id(p) not in self._joined]

    def _name(self, parameter: Tensor) -> str:
        for name, own in self._flat_model.model.named_parameters():
            if own is parameter:
                return f"the parameter {plain_name(name)}"
        return "a parameter that is not in the model"


_REMEDY = (
    ", and workers would not share it: call swarm.finish() and join again with all that is trained from then on, or "
    "join with it from the start"
)
