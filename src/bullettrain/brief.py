"""One-line texts of objects, errors and dataclass fields."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Collection


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


def one_line(thing: object, without: Collection[str] = ()) -> str:
    """Return ``Class(argument=value, …)`` with the constructor arguments that are attributes.

    Arguments ``without``, those that are None, and dataclasses that equal the default, are left out.
    """
    kept = []
    for name, default in _arguments(type(thing)).items():
        value = getattr(thing, name, None)
        is_default = dataclasses.is_dataclass(value) and value == default
        if value is not None and not is_default and name not in without:
            kept.append(f"{name}={brief(value)}")
    return f"{type(thing).__name__}({', '.join(kept)})"


def _arguments(kind: type) -> dict[str, object]:
    """Return constructor arguments and defaults, including those of base classes that get ``**kwargs``."""
    arguments: dict[str, object] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        arguments = {name: parameter.default for name, parameter in parameters.items()} | arguments
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return arguments


def brief(value: object) -> str:
    """Return a short text: floats to six digits, functions by name, other objects by type."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return f"({', '.join(map(brief, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return one_line(value)
    own = getattr(type(value).__repr__, "__module__", "") or ""
    if isinstance(value, int | str) or own.startswith("bullettrain."):
        return repr(value)
    return getattr(value, "__name__", type(value).__name__)


def meanings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, on one line. The class has to be at module level."""
    body, texts = _classes(kind.__module__)[kind.__name__].body, {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            texts[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return texts


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the class definitions in the source of a module."""
    source = ast.parse(inspect.getsource(sys.modules[module]))
    return {part.name: part for part in source.body if isinstance(part, ast.ClassDef)}
