"""Check parsed JSON and YAML against type annotations."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from bullettrain.validation import instead

MAX_NUMBER = 1e300
hints = functools.cache(typing.get_type_hints)
"""Returns the types of a dataclass's fields, by name."""
UNIONS = (types.UnionType, typing.Union)
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


class SchemaError(ValueError):
    """A value has the wrong type. The message is one line with its name, the value and the type."""


def conform(value: Any, kind: Any, where: str = "", *, text: Callable[[str, Any, str], Any] | None = None) -> Any:
    """Convert a value of parsed JSON or YAML to the type ``kind``.

    Args:
        value: dicts, lists, strings, numbers, booleans and None.
        kind: a dataclass, a ``Literal``, a union, ``tuple[T, ...]``, ``tuple[A, B]``, ``list[T]``, ``dict[str, T]``,
            ``bool``, ``int``, ``float``, ``str``, ``None`` or ``Any``. Numbers have to be finite.
        where: name of the value for messages, e.g. ``"training.epochs"``.
        text: function that converts strings of another kind, as in ``eps: 8/255``; called with the string, ``kind`` and
            ``where``.

    Raises:
        SchemaError: ``value`` has another type, a key is unknown, or a key without a default is missing.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if not _is(value, kind):
        if text is not None and isinstance(value, str) and not dataclasses.is_dataclass(kind):
            return text(value, kind, where)
        raise SchemaError(f"{where or 'it'} is {_short(value)}; it has to be {type_name(kind)}")
    if origin in UNIONS:
        return conform(value, next(option for option in arguments if _is(value, option)), where, text=text)
    if dataclasses.is_dataclass(kind):
        return _fields(value, kind, where, text)
    if origin is dict:
        return {key: conform(item, arguments[1], _join(where, key), text=text) for key, item in value.items()}
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(conform(item, part, where, text=text) for item, part in zip(value, arguments, strict=True))
    if origin in (list, tuple):
        return origin(conform(item, arguments[0], f"{where}[{i}]", text=text) for i, item in enumerate(value))
    return float(value) if kind is float else value


def _fields(value: Mapping[Any, Any], kind: Any, where: str, text: Callable[[str, Any, str], Any] | None) -> Any:
    kinds = hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise SchemaError(f"there is no setting {_join(where, str(key))!r}{instead(str(key), fields)}")
    for name, field in fields.items():
        if name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise SchemaError(f"{_join(where, name)} is missing")
    return kind(**{key: conform(item, kinds[key], _join(where, key), text=text) for key, item in value.items()})


def _is(value: Any, kind: Any) -> bool:
    """Return whether ``value`` has the outermost type of ``kind``. An int is also a float; a bool is not a number."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in UNIONS:
        return any(_is(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is dict or dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping) and (origin is not dict or all(isinstance(key, str) for key in value))
    if origin in (list, tuple):
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        return isinstance(value, list | tuple) and (not fixed or len(value) == len(arguments))
    if kind in (int, float):
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return number and (kind is int or -MAX_NUMBER <= value <= MAX_NUMBER)
    return kind is Any or isinstance(value, kind)


def type_name(kind: Any, limits: str = "") -> str:
    """Describe a type in words, with the ``limits`` of its numbers."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in UNIONS:
        return " or ".join(type_name(argument, limits) for argument in arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return "a list of " + " and ".join(map(type_name, arguments))
    if origin in (list, tuple):
        return f"a list, each {type_name(arguments[0], limits)}"
    return NAMES.get(kind, "a section of keys") + (limits if kind in (int, float) else "")


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _short(value: Any) -> str:
    """Return a short repr, also of deeply nested values."""
    shown = reprlib.Repr()
    shown.maxlevel, shown.maxlist, shown.maxdict, shown.maxlong = 2, 4, 4, 40
    return shown.repr(value)
