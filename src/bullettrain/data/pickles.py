"""A safe unpickler for dataset files: it only creates arrays, lists, dicts, strings and numbers.

A pickle can name any function and have it called. This unpickler knows the few names below, which check their
arguments and call no numpy constructor. Any other name is an error.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bullettrain.data.base import DataError, reading_original


def _refused(what: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"it asks for {what}")


def _check(permitted: object, what: str) -> None:
    if not permitted:
        raise _refused(what)


class _Call:
    """A permitted function. It has no ``__dict__``, so that the BUILD opcode cannot set attributes on it."""

    __slots__ = ("function", "name")

    def __init__(self, name: str, function: Callable[..., Any] | None) -> None:
        self.name, self.function = name, function

    def __call__(self, *args: Any) -> Any:
        if self.function is None:
            raise _refused(f"a call of {self.name}")
        return self.function(*args)

    def __setstate__(self, state: object) -> None:
        raise _refused(f"a change to {self.name}")


class _DType:
    """A numeric dtype, from its code. The byte order is set by the state."""

    __slots__ = ("code", "order")

    def __init__(self, code: object, *_: object) -> None:
        self.code, self.order = text(code).lstrip("|<>="), "|"
        _check(re.fullmatch(r"b1|[iu][1248]|f[248]", self.code), f"an array of dtype {self.code!r}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, subarray, names, fields = state[:5]
        _check(subarray is None and names is None and fields is None, "an array of a structured dtype")
        self.order = text(order)

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(">" + self.code if self.order == ">" else "<" + self.code)


class _Array(np.ndarray[Any, np.dtype[Any]]):
    """An array that only accepts as many bytes as its shape and dtype need."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, dtype, fortran, data = state
        _check(isinstance(dtype, _DType), "an array without a dtype")
        _check(isinstance(data, bytes), "an array of objects")
        shape = tuple(int(n) for n in shape)
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.numpy.itemsize != len(data):
            raise ValueError(f"an array of shape {shape} does not fit its {len(data)} bytes")
        super().__setstate__((version, shape, dtype.numpy, bool(fortran), data))  # type: ignore[arg-type]


def text(value: object) -> str:
    """Return a str, or bytes of Python 2 decoded. Raises UnpicklingError for any other type."""
    if not isinstance(value, str | bytes):
        raise _refused(f"a {type(value).__name__} where text belongs")
    return value.decode("latin1") if isinstance(value, bytes) else value


def _reconstruct(kind: object, *_: object) -> _Array:
    _check(kind is _PERMITTED["numpy.ndarray"], "an array of another type than numpy.ndarray")
    return np.ndarray.__new__(_Array, (0,), np.uint8)


def _encode(value: object, encoding: object = "latin1") -> bytes:
    # Protocol 2 writes the bytes of Python 3 as a call of this function.
    _check(text(encoding) in ("latin1", "latin-1"), f"_codecs.encode to {encoding!r}")
    return text(value).encode("latin1")


_FUNCTIONS: dict[str, Callable[..., Any] | None] = {
    "numpy.ndarray": None,  # only an argument of _reconstruct
    "numpy.dtype": _DType,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "_codecs.encode": _encode,
}
_PERMITTED = {name: _Call(name, function) for name, function in _FUNCTIONS.items()}


class _Dict(dict[Any, Any]):
    """A dict with text keys only: hashing deeply nested tuples can take forever."""

    def __setitem__(self, key: object, value: object) -> None:
        text(key)
        super().__setitem__(key, value)


class _Unpickler(pickle._Unpickler):
    """The Python implementation: the one in C allocates as much memory as a memo index in the file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        _check((full := f"{module}.{name}") in _PERMITTED, full)
        return _PERMITTED[full]

    def persistent_load(self, pid: object) -> Any:
        raise _refused("a persistent object")

    def _make_dict(self: Any) -> None:
        items, result = self.pop_mark(), _Dict()
        for key, value in zip(items[::2], items[1::2], strict=True):
            result[key] = value
        self.append(result)

    dispatch = {
        code: method
        for code, method in pickle._Unpickler.dispatch.items()
        if code not in pickle.BYTEARRAY8 + pickle.EMPTY_SET + pickle.FROZENSET + pickle.ADDITEMS
    } | {pickle.EMPTY_DICT[0]: lambda self: self.append(_Dict()), pickle.DICT[0]: _make_dict}


def read_pickle(path: Path, name: str) -> dict[str, Any]:
    """Read the dictionary pickled in ``path``, a file of dataset ``name``, with str keys.

    Strings written by Python 2 are returned as bytes, arrays as numeric numpy arrays.
    """
    with reading_original(path, name, "a pickle"):
        # In memory, so that a wrong length in a damaged file cannot allocate more.
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not the dictionary of a {name} file.")
    return {text(key): value for key, value in content.items()}
