"""An unpickler for dataset files: it builds arrays, lists, dicts, strings and numbers, and nothing else.

A pickle is a program that may call anything it can name. Here a name leads to one of the few calls below,
which check their arguments and touch no numpy constructor; every other name stops the reading.
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

from bullettrain.data.base import DataError, read_bytes, renewed_by


class _RefusedError(Exception):
    """The pickle asks for something that no dataset file needs; the argument says for what."""


class _Call:
    """A permitted name. Without state, so that the BUILD opcode cannot set attributes on it."""

    __slots__ = ("function", "name")

    def __init__(self, name: str, function: Callable[..., Any] | None = None) -> None:
        self.name, self.function = name, function

    def __call__(self, *args: Any) -> Any:
        if self.function is None:
            raise _RefusedError(f"a call of {self.name}")
        return self.function(*args)

    def __setstate__(self, state: object) -> None:
        raise _RefusedError(f"a change to {self.name}")


class _DType:
    """A dtype of plain numbers, by its code; the byte order comes with the state."""

    __slots__ = ("code", "order")

    def __init__(self, code: object, *_: object) -> None:
        self.code, self.order = _text(code).lstrip("|<>="), "|"
        if not re.fullmatch(r"b1|[iu][1248]|f[248]", self.code):
            raise _RefusedError(f"an array of dtype {self.code!r}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, subarray, names, fields = state[:5]
        if not (subarray is None and names is None and fields is None):
            raise _RefusedError("an array of a structured dtype")
        self.order = _text(order)

    @property
    def numpy(self) -> np.dtype[Any]:
        return np.dtype(">" + self.code if self.order == ">" else "<" + self.code)


class _Array(np.ndarray[Any, np.dtype[Any]]):
    """An array that only takes the bytes that its shape and dtype account for."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        version, shape, dtype, fortran, data = state
        if not isinstance(dtype, _DType):
            raise _RefusedError("an array without a dtype")
        if not isinstance(data, bytes):
            raise _RefusedError("an array of objects")
        shape = tuple(int(n) for n in shape)
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.numpy.itemsize != len(data):
            raise ValueError(f"an array of shape {shape} does not fit its {len(data)} bytes")
        super().__setstate__((version, shape, dtype.numpy, bool(fortran), data))  # type: ignore[arg-type]


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


def _reconstruct(kind: object, *_: object) -> _Array:
    if kind is not _NDARRAY:
        raise _RefusedError("an array of another type than numpy.ndarray")
    return np.ndarray.__new__(_Array, (0,), np.uint8)


def _encode(text: object, encoding: object = "latin1") -> bytes:
    # The way protocol 2 writes the bytes of Python 3.
    if not isinstance(text, str) or _text(encoding) not in ("latin1", "latin-1"):
        raise _RefusedError(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


_NDARRAY = _Call("numpy.ndarray")
_PERMITTED = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _Call("numpy.dtype", _DType),
    ("numpy.core.multiarray", "_reconstruct"): _Call("numpy.core.multiarray._reconstruct", _reconstruct),
    ("numpy._core.multiarray", "_reconstruct"): _Call("numpy._core.multiarray._reconstruct", _reconstruct),
    ("_codecs", "encode"): _Call("_codecs.encode", _encode),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PERMITTED[module, name]
        except KeyError:
            raise _RefusedError(f"{module}.{name}") from None

    def persistent_load(self, pid: object) -> Any:
        raise _RefusedError("a persistent object")


def read_pickle(path: Path, name: str) -> dict[str, Any]:
    """The dictionary pickled in `path`, a file of dataset `name`, with its keys as str.

    Strings written by Python 2 come back as bytes, arrays as numpy arrays of plain numbers.
    """
    data = read_bytes(path, name)
    try:
        # From memory: a length in a damaged file then asks for no more than the file has.
        content = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _RefusedError as refusal:
        raise DataError(
            f"{path} asks for {refusal}, which no {name} file does, and was not read further:"
            f" delete it and run `{renewed_by(path, name)}`."
        ) from None
    except Exception as error:  # whatever a damaged file makes the unpickler stumble over
        raise DataError(
            f"{path} is truncated or not a pickle ({_first_line(error)}): delete it and run `{renewed_by(path, name)}`."
        ) from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not the dictionary of a {name} file.")
    return {_text(key): value for key, value in content.items()}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
