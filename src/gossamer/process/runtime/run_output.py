"""What a loop of one's own leaves behind while it trains, as the swarm sees it (``gossamer.runs.loop.loop_output``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.errors import InputError


class RunOutput(Protocol):
    """The run folder and the tracker of this worker."""

    def log(self, values: Mapping[str, float | Tensor], of_average: bool) -> None:
        """Take figures from the loop; ``of_average``: of the averaged model."""
        ...

    def resumed(self, step: int) -> None:
        """This worker continues from a checkpoint of that step."""
        ...

    def training_ended(self) -> None:
        """This worker makes no more steps; the final average follows."""
        ...

    def finish(self) -> None:
        """The model is the final average: complete the folder. The store can still be reached."""
        ...

    def close(self, error: BaseException | None) -> None:
        """The worker leaves without the final average, because of ``error`` if there is one."""
        ...


def checked(values: Mapping[str, Any]) -> dict[str, float | Tensor]:
    """Return figures as floats. Tensors on a GPU are copied there: nobody waits for it."""
    taken: dict[str, float | Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise InputError(
                    f"log: {name} is a tensor of shape {tuple(value.shape)} and {value.dtype}: expected one real "
                    f"number; log its mean, for example"
                )
            on_host = value.device.type == "cpu"
            taken[name] = float(value.item()) if on_host else value.detach().reshape(()).to(torch.float64, copy=True)
            continue
        try:
            # Texts have no __float__, though float() would read numbers in them.
            taken[name] = float(value) if hasattr(type(value), "__float__") else _refuse(name, value)
        except (TypeError, ValueError, OverflowError):
            _refuse(name, value)
    return taken


def _refuse(name: str, value: Any) -> float:
    raise InputError(f"log: {name} is {value!r}: expected a number, or a tensor with one element")
