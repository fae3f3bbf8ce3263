"""Workers' vectors as rows whose operations are recorded on the tape and executed later.

A ``Row`` is not a tensor but can be used like one. The in-place operations that methods consist of (``add_``, ``sub_``,
``mul_``, ``lerp_``, ``copy_``, ``clone``, and the sums of ``gossamer.vector_math``) are recorded. Any other torch
function or operator flushes the tape and then works on the real row, for this worker alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.virtual.compute.matrix import Slot

if TYPE_CHECKING:
    from gossamer.virtual.compute.tape import Tape


class Row:
    """A flat vector of one worker: a slot of a matrix, with the operations of a tensor."""

    __slots__ = ("combine", "detached", "slot", "tape")

    def __init__(self, tape: Tape, slot: Slot) -> None:
        self.tape, self.slot = tape, slot
        self.combine = tape.combine
        """``gossamer.vector_math.combine`` calls this."""
        self.detached: Tensor | None = None
        """The tensor that this row has become (``Temporary``). Operations on it are not recorded any more."""

    def tensor(self) -> Tensor:
        """Flush the tape and return the real row."""
        self.tape.flush()
        return self.slot.data

    def copy_(self, other: Any) -> Row:
        self.combine(((self, 0.0, ((1.0, other),)),))
        return self

    def add_(self, other: Any, *, alpha: float = 1.0) -> Row:
        self.combine(((self, 1.0, ((alpha, other),)),))
        return self

    def sub_(self, other: Any, *, alpha: float = 1.0) -> Row:
        self.combine(((self, 1.0, ((-alpha, other),)),))
        return self

    def lerp_(self, other: Any, weight: float) -> Row:
        self.combine(((self, 1.0 - weight, ((weight, other),)),))
        return self

    def mul_(self, factor: Any) -> Row:
        if isinstance(factor, (int, float)):
            self.combine(((self, 0.0, ((factor, self),)),))
        else:
            self.tensor().mul_(dense(factor))
        return self

    def clone(self) -> Any:
        return self.temporary().copy_(self)

    def temporary(self) -> Temporary:
        """Return a new row of the same length. Its content is undefined."""
        return Temporary(self.tape, self.slot.pool.lend())

    def numel(self) -> int:
        return self.slot.pool.width

    def element_size(self) -> int:
        return self.tape.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.slot.pool.width * self.tape.dtype.itemsize

    def __len__(self) -> int:
        return self.slot.pool.width

    def __getitem__(self, item: Any) -> Tensor:
        return self.tensor()[item]

    def __setitem__(self, item: Any, value: Any) -> None:
        self.tensor()[item] = dense(value)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*map(_dense_inside, args), **{k: _dense_inside(v) for k, v in (kwargs or {}).items()})


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Row, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*map(dense, others))

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "pow", "matmul", "abs", "float"):
    setattr(Row, f"__{_name}__", _operator(f"__{_name}__"))


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self.tensor(), name))


# Every other attribute of a tensor. ``__getattr__`` would do the same but slow down access to the row's own attributes.
for _name in dir(Tensor):
    if not _name.startswith("__") and not hasattr(Row, _name):
        setattr(Row, _name, _attribute(_name))


class Temporary(Row):
    """A row in a slot that its pool lends; the slot goes back when the last reference to the row is gone.

    A temporary row that is read as a tensor becomes a tensor of its own, because views of that tensor may outlive the
    loan.
    """

    __slots__ = ()

    def tensor(self) -> Tensor:
        if self.detached is None:
            self.detached = super().tensor().clone()
        return self.detached

    def __del__(self) -> None:
        self.slot.pool.free.append(self.slot)


def dense(value: Any) -> Any:
    """Return the real tensor if ``value`` is a row, else ``value``."""
    return value.tensor() if isinstance(value, Row) else value


def _dense_inside(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dense_inside, value))
    return dense(value)
