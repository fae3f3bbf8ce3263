"""Workers' vectors as rows whose operations are recorded on the tape and executed later.

A ``Row`` is not a tensor but can be used like one. The in-place operations that methods consist of (``add_``, ``sub_``,
``mul_``, ``lerp_``, ``copy_``, ``clone``, and the sums of ``vector_math``) are recorded. Any other torch function or
operator flushes the tape and then works on the real row, for this worker alone (``tensor_like``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.virtual.compute.matrix import Slot
from gossamer.virtual.compute.tensor_like import TensorLike, forward

if TYPE_CHECKING:
    from gossamer.virtual.compute.tape import Tape


class Row(TensorLike):
    """A flat vector of one worker: a slot of a matrix, with the operations of a tensor."""

    __slots__ = ("combine", "detached", "slot", "tape")

    def __init__(self, tape: Tape, slot: Slot) -> None:
        self.tape, self.slot = tape, slot
        self.combine = tape.combine
        """``gossamer.vectors.vector_math.combine`` calls this."""
        self.detached: Tensor | None = None
        """The tensor that this row has become (``Temporary``). Operations on it are not recorded any more."""

    def tensor(self) -> Tensor:
        """Flush the tape and return the real row."""
        self.tape.flush()
        return self.slot.data

    def memory(self) -> Tensor:
        return self.slot.data

    def copy_(self, other: Any, non_blocking: bool = False) -> Row:
        self.combine(((self, 0.0, ((1.0, other),)),))
        return self

    def add_(self, other: Any, *, alpha: float = 1.0) -> Row:
        self.combine(((self, 1.0, ((alpha, other),)),))
        return self

    def sub_(self, other: Any, *, alpha: float = 1.0) -> Row:
        self.combine(((self, 1.0, ((-alpha, other),)),))
        return self

    def lerp_(self, other: Any, weight: Any) -> Row:
        if isinstance(weight, (int, float)):
            self.combine(((self, 1.0 - weight, ((weight, other),)),))
        else:
            forward(Tensor.lerp_, (self, other, weight))
        return self

    def mul_(self, factor: Any) -> Row:
        if isinstance(factor, (int, float)):
            self.combine(((self, 0.0, ((factor, self),)),))
        else:
            forward(Tensor.mul_, (self, factor))
        return self

    __iadd__, __isub__, __imul__ = add_, sub_, mul_

    def clone(self) -> Any:
        return self.temporary().copy_(self)

    def temporary(self) -> Temporary:
        """Return a new row of the same length. Its content is undefined."""
        return Temporary(self.tape, self.slot.pool.lend())

    def numel(self) -> int:
        return self.slot.pool.width

    def element_size(self) -> int:
        return self.tape.dtype.itemsize

    def dim(self) -> int:
        return 1

    @property
    def dtype(self) -> torch.dtype:
        return self.tape.dtype

    @property
    def nbytes(self) -> int:
        return self.slot.pool.width * self.tape.dtype.itemsize

    def __len__(self) -> int:
        return self.slot.pool.width


class Temporary(Row):
    """A row in a slot that its pool lends; the slot goes back when the last row in it is gone.

    A temporary row that is read as a tensor becomes a tensor of its own, because views of that tensor may outlive the
    loan. All later operations work on that tensor at once, so its views need no care.
    """

    __slots__ = ()
    guarded = False

    def tensor(self) -> Tensor:
        if self.detached is None:
            self.detached = super().tensor().clone()
        return self.detached

    def memory(self) -> Tensor:
        return self.slot.data if self.detached is None else self.detached

    def share(self) -> Any:
        """Return a row of the same content. The content is copied only if one of the two is written to."""
        if self.detached is not None:
            return self.detached.clone()
        self.slot.num_rows += 1
        return Temporary(self.tape, self.slot)

    def leave_shared_slot(self) -> Slot:
        """Move the content to a slot of its own, before it is written to. Return that slot."""
        shared, self.slot = self.slot, self.slot.pool.lend()
        self.copy_(Row(self.tape, shared))
        shared.num_rows -= 1
        return self.slot

    def __del__(self) -> None:
        slot = self.slot
        slot.num_rows -= 1
        if not slot.num_rows:
            slot.pool.free.append(slot)


def copy_of(vector: Any) -> Any:
    """Return the content of a vector that travels: the receiver may keep it and write to it, and so may the sender."""
    return vector.share() if type(vector) is Temporary else vector.clone()
