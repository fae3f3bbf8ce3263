"""Sign with scale: one bit per element, and the mean magnitude of every chunk.

``kept = s · sign(v)`` with ``s = mean |v|`` over chunks of 4,096 elements; sign(0) counts as +1. A byte holds eight
signs: about 32 times smaller than float32. Messages are gathered, and summed in rank order.

‖v − kept‖² = ‖v‖² − (chunk length) s² in every chunk.

Reference: Karimireddy, Rebjock, Stich, Jaggi, "Error feedback fixes SignSGD", ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gossamer.compress import chunks
from gossamer.compress.compressor import Averaging
from gossamer.effects import Gather

if TYPE_CHECKING:
    from gossamer.worker import Worker

CHUNK = 4096


@dataclass(frozen=True)
class Sign:
    """One bit per element and one scale per 4,096: about 32 times smaller. The ratio is fixed."""

    name: ClassVar[str] = "sign"

    def average(self, worker: Worker, vector: Tensor, round: int, topic: str) -> Averaging:
        scales, packed = _encode(vector)
        answers = yield Gather((scales, packed), round, topic)
        mean = torch.zeros_like(vector)
        for their_scales, their_packed in answers:
            mean.add_(_decode(their_scales, their_packed, vector))
        return mean.div_(len(answers)), _decode(scales, packed, vector)

    def size_bytes(self, num_elements: int, itemsize: int = 4) -> int:
        return chunks.num_chunks(num_elements, CHUNK) * itemsize + -(-num_elements // 8)


def _encode(vector: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of every chunk, and the signs packed into bytes."""
    lengths = torch.full((chunks.num_chunks(vector.numel(), CHUNK),), CHUNK, device=vector.device)
    lengths[-1] = vector.numel() - CHUNK * (len(lengths) - 1)
    scales = (chunks.norms(vector, CHUNK, 1) / lengths).to(vector.dtype)

    bits = torch.zeros(-(-vector.numel() // 8) * 8, dtype=torch.uint8, device=vector.device)
    torch.ge(vector, 0, out=bits[: vector.numel()])
    bits = bits.view(-1, 8)
    packed = bits[:, 0].clone()
    for position in range(1, 8):
        packed |= bits[:, position] << position
    return scales, packed


def _decode(scales: Tensor, packed: Tensor, like: Tensor) -> Tensor:
    """Return ``±scale`` for every element of a vector as long as ``like``."""
    positions = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, None] >> positions).bitwise_and_(1)
    signs = bits.view(-1)[: like.numel()].to(like.dtype).mul_(2).sub_(1)
    return chunks.multiply_(signs, scales, CHUNK)
