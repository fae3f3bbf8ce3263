"""Int8: every element rounded to one of 255 evenly spaced values.

``kept = s · round(v / s)`` with ``s = max |v| / 127`` over chunks of 2,048 elements: about 4 times smaller
than float32, with an error of at most ``s/2``. Messages are gathered, and summed in rank order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gossamer.compress import chunks
from gossamer.compress.compressor import Averaging
from gossamer.effects import Gather

if TYPE_CHECKING:
    from gossamer.worker import Worker

CHUNK = 2048


@dataclass(frozen=True)
class Int8:
    """One byte per element and one scale per 2,048: about 4 times smaller. The ratio is fixed."""

    name: ClassVar[str] = "int8"

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        scales, values = _encode(vector)
        answers = yield Gather((scales, values), round, topic)
        mean = torch.zeros_like(vector)
        for their_scales, their_values in answers:
            mean.add_(_decode(their_scales, their_values))
        return mean.div_(len(answers)), _decode(scales, values)

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return chunks.num_chunks(num_elements, CHUNK) * itemsize + num_elements


def _encode(vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of every chunk, and the elements as multiples of it."""
    scales = (chunks.norms(vector, CHUNK, math.inf) / 127).to(vector.dtype)
    # Scale 0: all elements are zero, or too small for a scale. Divided by 1 they round to zero.
    multiples = chunks.divide(vector, scales.masked_fill(scales == 0, 1), CHUNK)
    # A scale that was rounded down can give 127.5. NaN has no int8 value; the scale of the chunk carries it.
    multiples.round_().clamp_(-127, 127).nan_to_num_(0)
    return scales, multiples.to(torch.int8)


def _decode(scales: Tensor, values: Tensor) -> Tensor:
    return chunks.multiply_(values.to(scales.dtype), scales, CHUNK)
