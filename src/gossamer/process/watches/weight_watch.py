"""Notices when weights change by something else than ``step()`` of the optimizer that was joined.

Between two steps nobody but the user writes to the parameters. Three cheap signs tell that somebody did:

- torch counts in-place changes of each parameter (``Tensor._version``), and a sample of the weights tells whether a
  change left something behind. A model that is swapped for its moving average and back is as it was.
- A parameter that was moved or replaced is no view of the flat vector any more.
- Torch tells of the step of every optimizer: one that is not ours, but has our parameters, has replaced ours.

What was changed counts: ``adopt`` adds it to ``x`` before the next step and before the final average. Steps that the
swarm does not see are an error if it has never seen one, and after ``MAX_UNSEEN`` in any case: such a worker trains
alone.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from gossamer.errors import InputError
from gossamer.process.events import EventKind, Events
from gossamer.process.runtime.flat_model import FlatModel, plain_name
from gossamer.vectors import memory

WATCHED = 16
"""Parameters whose version is compared, spread over the model; as many, in turn, are checked for having moved."""

SAMPLE = 256
"""Elements of the weights that are compared, spread over the vector, besides the first one of each parameter."""

MAX_SAMPLED_PARTS = 1024
"""Of more parameters than this not all are in the sample."""

TOLERATED = 10
"""Unseen steps after which a worker whose steps were never seen raises, and another one says so."""

MAX_UNSEEN = 100
"""Unseen steps in a row after which every worker raises."""


class WeightWatch:
    """Watches the weights of one worker."""

    def __init__(self, flat_model: FlatModel, events: Events) -> None:
        self.flat_model, self.events = flat_model, events
        self.num_steps = 0
        """Steps that were seen."""
        self.num_unseen = 0
        """Steps since then, or since the start, that were not."""
        self._cause = ""
        spread = max(1, len(flat_model.viewed) // WATCHED)
        self._parameters = [parameter for parameter, _ in flat_model.viewed[::spread]][:WATCHED]
        self._turn = 0
        self._written_versions = self._backward_versions = self._versions()
        starts = [part.start for part in flat_model.flat.parts if part.end > part.start]
        every = [*range(0, flat_model.flat.size, max(1, flat_model.flat.size // SAMPLE))]
        chosen = sorted({*every, *starts[:: len(starts) // MAX_SAMPLED_PARTS + 1]})
        self._sampled = torch.tensor(chosen, device=flat_model.device)
        self._written_sample = self._sample()
        self._written: Tensor | None = None
        """A copy of the weights as we wrote them: only in loops that change them between steps."""
        self._said = self._said_buffers = False
        # The hooks must not keep this worker, and all its vectors, alive.
        watch = weakref.ref(self)

        def on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            found = watch()
            if found is not None and optimizer is not found.flat_model.optimizer:
                found.on_foreign_step(optimizer)

        def on_backward(parameter: Tensor) -> None:
            found = watch()
            if found is not None:
                found.on_backward()

        self._ids = {id(parameter) for parameter in flat_model.parameters}
        ends = {id(p): p for p in (flat_model.parameters[0], flat_model.parameters[-1])}.values()
        hooks = [
            register_optimizer_step_post_hook(on_step),
            *(parameter.register_post_accumulate_grad_hook(on_backward) for parameter in ends),
        ]
        self._remove_hooks = weakref.finalize(self, _remove_all, hooks)
        self._remove_hooks.atexit = False

    def close(self) -> None:
        self._remove_hooks()

    # Signs

    def _versions(self) -> int:
        return sum([parameter._version for parameter in self._parameters])

    def _sample(self) -> Tensor:
        return self.flat_model.weights.index_select(0, self._sampled)

    def written(self) -> None:
        """We have just written the weights."""
        self._written_versions = self._backward_versions = self._versions()
        self._written_sample = self._sample()
        if self._written is not None:
            self._written.copy_(self.flat_model.weights)

    def changed(self) -> bool:
        """Return whether somebody else has changed the weights since we wrote them."""
        if self._versions() == self._written_versions and not self.num_unseen:
            return False
        return not torch.equal(self._written_sample, self._sample())

    def on_backward(self) -> None:
        """A backward pass has reached a parameter."""
        versions = self._versions()
        if versions != self._backward_versions:
            self._backward_versions = versions
            if versions != self._written_versions:
                self._unseen("something else")

    def on_foreign_step(self, optimizer: Optimizer) -> None:
        """Another optimizer has made a step."""
        if any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"]):
            self._backward_versions = self._versions()
            self._unseen(f"another {type(optimizer).__name__}")

    def _unseen(self, cause: str) -> None:
        self.num_unseen += 1
        self._cause = cause
        if self.num_unseen == TOLERATED and self.num_steps:
            self.events.add(EventKind.UNSEEN, self._line())
        if self.num_unseen >= (MAX_UNSEEN if self.num_steps else TOLERATED) and self.changed():
            raise InputError(self._line())

    def _line(self) -> str:
        kind = type(self.flat_model.optimizer).__name__
        return (
            f"the weights were changed {self.num_unseen} times in a row by {self._cause}, not by step() of the {kind} "
            "given to join, so no worker learned of it: join after the optimizer is created, and call its step()"
        )

    # Occasions

    def before_step(self, begun: bool) -> bool:
        """Check the weights before a step; return whether they were changed, and x now has the change.

        ``begun``: this worker has made steps or exchanges before.
        """
        changed = self._put_back_some() or self.changed()
        # Parts of DTensors are taken over at every step: only the first one has to be told.
        changed = changed or (not begun and self.flat_model.sharded_changed())
        if changed:
            self._adopt(begun)
        self.num_steps += 1
        self.num_unseen = 0
        return changed

    def before_average(self, begun: bool) -> None:
        """Check the weights before they are averaged with those of the others."""
        self.flat_model.adopt_sharded()
        self._check_buffers()
        count = len(self.flat_model.viewed)
        moved = [self._put_back_some(all_names=True) for _ in range(0, count, WATCHED)]
        if not any(moved) and not self.changed():
            return
        if self.num_unseen and not self.num_steps:
            raise InputError(self._line())
        self._adopt(begun)

    def _check_buffers(self) -> None:
        added = self.flat_model.check_buffers()
        if added and not self._said_buffers:
            self._said_buffers = True
            text = (
                f"the buffer {added[0]} was added after join, so workers do not average it, and each keeps its own: "
                "register all buffers before join"
            )
            self.events.add(EventKind.NOT_AVERAGED, text)

    def _adopt(self, begun: bool) -> None:
        """Add to x what somebody else has changed in the weights."""
        flat_model = self.flat_model
        flat_model.adopt_sharded()
        if begun and not self._said:
            self._said = True
            text = (
                "the weights were changed between two steps, not by optimizer.step() (load_state_dict, clamping, …): "
                "the change counts on this worker, the others get it by averaging"
            )
            self.events.add(EventKind.UNSEEN, text)
        if flat_model.two_vectors and self._written is not None:
            flat_model.x.add_(flat_model.weights).sub_(self._written)
        elif flat_model.two_vectors:
            # What we had written is not known: exchanges since the last step are lost on this worker, this once.
            flat_model.x.copy_(flat_model.weights)
            if begun:
                self._written = memory.zeros_like(flat_model.weights)
        self.written()

    def _put_back_some(self, all_names: bool = False) -> bool:
        """Return whether some of the parameters had been moved, and put them back; the next call checks others."""
        moved, flat_model, count = False, self.flat_model, len(self.flat_model.viewed)
        some = range(self._turn, min(self._turn + WATCHED, count))
        self._turn = 0 if some.stop == count else some.stop
        for at in some:
            parameter, part = flat_model.viewed[at]
            view = flat_model.weight_views[at]
            if parameter.data_ptr() != view.data_ptr() and part.end > part.start:
                _put_back(part.name, parameter, view)
                moved = True
        # Finding a parameter by its name takes longer.
        for at in some if all_names else some[:1]:
            parameter, part = flat_model.viewed[at]
            if _find(flat_model.model, part.name) is not parameter:
                raise InputError(
                    f"the parameter {plain_name(part.name)} is not the one that was joined (load_state_dict with "
                    "assign=True, or a layer was replaced): make all changes to the model before join"
                )
        return moved


def _remove_all(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _put_back(name: str, parameter: Tensor, view: Tensor) -> None:
    """Make a parameter that was moved a view of the weights again, with its present values."""
    now, then = ((t.shape, t.dtype, t.device) for t in (parameter, view))
    if now != then:
        raise InputError(
            f"the parameter {plain_name(name)} was {_described(view)} at join and is {_described(parameter)} now "
            "(model.to, model.half): make all changes to the model before join"
        )
    view.copy_(parameter.detach())
    parameter.data = view


def _find(model: torch.nn.Module, name: str) -> Tensor | None:
    module: Any = model
    *path, last = name.split(".")
    for step in path:
        module = module._modules.get(step)
        if module is None:
            return None
    found = module._parameters.get(last)
    return found if isinstance(found, Tensor) else None


def _described(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
