"""What makes an object usable like a tensor: torch functions, operators and attributes that go to a real tensor.

The real tensor is looked up for every operation, when all recorded operations have been executed. Nothing escapes this:
an in-place function returns the object itself, and a function that returns a view of the tensor (a slice, ``view``,
``split``) returns a ``View``, which is evaluated again for every operation. So operations on views and recorded
operations stay in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from gossamer.errors import MethodError


class TensorLike:
    """Passes for a tensor: the one that ``tensor`` returns."""

    __slots__ = ()
    guarded: ClassVar[bool] = True
    """Whether operations are recorded, so that functions must not return tensors that share its memory."""

    def tensor(self) -> Tensor:
        """Execute what is recorded and return the real tensor."""
        raise NotImplementedError

    def memory(self) -> Tensor:
        """Return the real tensor without executing anything, for its shape and kind."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.memory())

    def __getitem__(self, item: Any) -> Any:
        item, memory = dense_inside(item), self.memory()
        copies = not self.guarded or isinstance(item, list) or (isinstance(item, Tensor) and item.dim() > 0)
        # An index that is out of range raises now, not at the first use of the view.
        if not copies and shares_memory(memory[item], memory):
            return View(self, lambda tensor: tensor[item])
        return self.tensor()[item]

    def __setitem__(self, item: Any, value: Any) -> None:
        self.tensor()[dense_inside(item)] = dense(value)

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.tensor().cpu().numpy(), dtype=dtype, copy=True)

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return forward(function, args, kwargs)


def dense(value: Any) -> Any:
    """Return the real tensor if ``value`` passes for one, else ``value``."""
    return value.tensor() if isinstance(value, TensorLike) else value


def dense_inside(value: Any) -> Any:
    """Return ``value`` with real tensors, also inside of lists and tuples."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(dense_inside, value))
    return dense(value)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def forward(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """Call a torch function with the real tensors. Return the row, or a view of it, where the result is one."""
    used: list[tuple[TensorLike, Tensor]] = []
    real_args = [_real(value, used) for value in args]
    real_kwargs = {name: _real(value, used) for name, value in (kwargs or {}).items()}
    result = function(*real_args, **real_kwargs)

    def evaluate(tensor: Tensor) -> Any:
        return function(tensor, *real_args[1:], **real_kwargs)

    source = used[0][0] if len(used) == 1 and used[0][0] is args[0] else None
    if isinstance(result, (list, tuple)):
        parts = [
            _guarded(part, used, function, source, partial(_item_of, evaluate, k)) for k, part in enumerate(result)
        ]
        return result if all(part is old for part, old in zip(parts, result, strict=True)) else type(result)(parts)
    return _guarded(result, used, function, source, evaluate)


def _real(value: Any, used: list[tuple[TensorLike, Tensor]]) -> Any:
    """Return ``value`` with real tensors. Add what they stand for to ``used``."""
    if isinstance(value, TensorLike):
        used.append((value, value.tensor()))
        return used[-1][1]
    if isinstance(value, (list, tuple)):
        return type(value)([_real(one, used) for one in value])
    return value


def _item_of(evaluate: Callable[[Tensor], Any], k: int, tensor: Tensor) -> Any:
    return evaluate(tensor)[k]


def _guarded(
    result: Any,
    used: list[tuple[TensorLike, Tensor]],
    function: Callable[..., Any],
    source: TensorLike | None,
    evaluate: Callable[[Tensor], Any],
) -> Any:
    """Return what stands for the result of a function: the argument that it is, a view of ``source``, or itself."""
    if isinstance(result, np.ndarray):
        if not any(value.guarded and np.shares_memory(result, tensor.numpy()) for value, tensor in used):
            return result
        source = None
    elif isinstance(result, Tensor):
        for value, tensor in used:
            if result is tensor:
                return value
        if not any(value.guarded and shares_memory(result, tensor) for value, tensor in used):
            return result
    else:
        return result
    if source is None:
        raise MethodError(
            f"{_name(function)} would return a view of a worker's vector that could be read out of order: use a slice, "
            "as x[a:b], or a copy, x.clone()"
        )
    return View(source, evaluate)


class View(TensorLike):
    """A view of a row. Every operation flushes the tape and works on the view of the real row."""

    __slots__ = ("base", "evaluate")

    def __init__(self, base: TensorLike, evaluate: Callable[[Tensor], Tensor]) -> None:
        """``evaluate(tensor)`` returns the view of the tensor that ``base`` stands for."""
        self.base, self.evaluate = base, evaluate

    def tensor(self) -> Tensor:
        return self.evaluate(self.base.tensor())

    def memory(self) -> Tensor:
        return self.evaluate(self.base.memory())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", str(function)).strip("_")


def _method(name: str) -> Callable[..., Any]:
    function = getattr(Tensor, name)

    def method(self: TensorLike, *args: Any, **kwargs: Any) -> Any:
        return forward(function, (self, *args), kwargs)

    method.__name__ = name
    return method


def _attribute(name: str) -> property:
    def read(tensor: Tensor) -> Any:
        return getattr(tensor, name)

    read.__name__ = name
    return property(lambda self: forward(read, (self,)))


def _metadata_method(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.memory(), name)(*args, **kwargs)


def _metadata(name: str) -> property:
    return property(lambda self: getattr(self.memory(), name))


OPERATORS = (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv", "floordiv",
    "rfloordiv", "mod", "rmod", "pow", "rpow", "ipow", "matmul", "rmatmul", "and", "or", "xor", "invert", "neg", "pos",
    "abs", "eq", "ne", "lt", "le", "gt", "ge", "float", "int", "bool", "index", "contains",
)  # fmt: skip

METADATA = (
    "shape", "dtype", "device", "ndim", "nbytes", "itemsize", "layout", "requires_grad", "is_cuda", "dim", "size",
    "numel", "stride", "element_size", "is_contiguous", "is_floating_point", "get_device",
)  # fmt: skip


def _define_operations() -> None:
    """Define the operations of a tensor. ``__getattr__`` would do the same but slow down the row's own attributes."""
    for name in OPERATORS:
        setattr(TensorLike, f"__{name}__", _method(f"__{name}__"))
    for name in dir(Tensor):
        if name.startswith("_") or hasattr(TensorLike, name):
            continue
        is_method, is_metadata = callable(getattr(Tensor, name)), name in METADATA
        if is_method:
            setattr(TensorLike, name, _metadata_method(name) if is_metadata else _method(name))
        else:
            setattr(TensorLike, name, _metadata(name) if is_metadata else _attribute(name))


_define_operations()
