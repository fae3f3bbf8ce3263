"""Workers' vectors as rows whose operations are recorded on a tape and executed later.

A row is not a tensor but passes for one. The in-place operations that methods are made of (``add_``, ``sub_``,
``mul_``, ``lerp_``, ``copy_``, ``clone``, and the sums of ``gossamer.vector_math``) are only written down. Any other
torch function or operator first executes what is pending and then works on the real row, one worker at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from gossamer.virtual.compute.tape import Matrix, Tape, VectorPool


class Slot:
    """Where a row lies, and the stages of the tape at which it is there to be read and free to be written."""

    __slots__ = ("data", "handle", "index", "matrix", "pool", "readable", "writable")

    def __init__(self, pool: VectorPool, matrix: Matrix, index: int) -> None:
        self.pool, self.matrix, self.index, self.data = pool, matrix, index, matrix.data[index]
        self.handle = pool.tape.executor.handle(self.data)
        self.readable = self.writable = 0


class Row:
    """One row of a matrix: stands for a flat tensor."""

    __slots__ = ("combine", "own", "slot", "tape")

    def __init__(self, tape: Tape, slot: Slot) -> None:
        self.tape, self.slot = tape, slot
        self.combine = tape.combine
        """What ``gossamer.vector_math.combine`` calls."""
        self.own: Tensor | None = None
        """The tensor it has become, if it has no place on the tape any more."""

    def tensor(self) -> Tensor:
        """The real row, once everything pending has been executed."""
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
        return self.another().copy_(self)

    def another(self) -> Temporary:
        """A row as long to keep something in for a while; its content is undefined."""
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


# Whatever else a tensor has. Not by ``__getattr__``, with which Python would be slow to find what a row itself has.
for _name in dir(Tensor):
    if not _name.startswith("__") and not hasattr(Row, _name):
        setattr(Row, _name, _attribute(_name))


class Temporary(Row):
    """A row in a slot on loan, given back when nobody holds it any more.

    Once somebody looks at it as a tensor it becomes one of its own, since views of it may outlive the loan.
    """

    __slots__ = ()

    def tensor(self) -> Tensor:
        if self.own is None:
            self.own = super().tensor().clone()
        return self.own

    def __del__(self) -> None:
        self.slot.pool.free.append(self.slot)


def dense(value: Any) -> Any:
    """The real tensor behind ``value`` if it is a row, else ``value``."""
    return value.tensor() if isinstance(value, Row) else value


def _dense_inside(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_dense_inside, value))
    return dense(value)
