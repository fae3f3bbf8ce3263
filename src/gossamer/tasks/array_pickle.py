"""Read a pickle of plain numpy arrays without giving it a chance to run anything.

CIFAR-10 is published as pickles, and a pickle is a program: `pickle.load` calls whatever it names. The reader
here resolves only the names that a pickled array mentions, and to stand-ins that merely note what the pickle
says. Not even numpy's own constructors are within its reach; arrays are made from the notes afterwards.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np


class _Dtype:
    """What a pickle says about an element type."""

    def __init__(self, code: str | bytes, align: bool = False, copy: bool = False) -> None:
        self.code = code
        self.byteorder: str | bytes = "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byteorder = state[1]

    def resolve(self) -> np.dtype:
        code = _text(self.code)
        # "|": one byte, so in no order.
        dtype = np.dtype(code if _text(self.byteorder) == "|" else _text(self.byteorder) + code)
        if dtype.kind not in "biuf":
            raise pickle.UnpicklingError(f"an array of {dtype}, which is not a plain number")
        return dtype


class _Array:
    """What a pickle says about an array."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.fortran, self.content = state

    def resolve(self) -> np.ndarray:
        flat = np.frombuffer(self.content, self.dtype.resolve())
        return flat.reshape(self.shape, order="F" if self.fortran else "C")


def _reconstruct(subtype: object, shape: object, typecode: object) -> _Array:
    return _Array()


def _from_buffer(content: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _encode(text: str, encoding: str) -> bytes:
    # Python 3 writes bytes this way for Python 2 to read; other codecs do much more than that.
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes in encoding {encoding!r}")
    return text.encode("latin1")


def _text(text: str | bytes) -> str:
    return text.decode("ascii") if isinstance(text, bytes) else text


_STAND_INS = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not part of an array")
        return _STAND_INS[module, name]


def load_arrays(path: Path) -> dict[str, Any]:
    """The pickled dictionary, with str keys and numpy arrays; anything else raises UnpicklingError.

    Written by Python 2 or 3 alike.
    """
    with path.open("rb") as file:
        try:
            content = _Unpickler(file, encoding="bytes").load()
            if not isinstance(content, dict):
                raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, not a dictionary")
            return {
                _text(key): value.resolve() if isinstance(value, _Array) else value for key, value in content.items()
            }
        except (pickle.UnpicklingError, OSError, MemoryError):
            raise
        except Exception as error:
            # A damaged pickle fails in as many ways as there are opcodes.
            raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error
