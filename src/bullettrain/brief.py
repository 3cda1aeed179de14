"""Things in one line: objects for a prompt or a log, errors for a message, settings and options for their help."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys


def first_line(error: BaseException) -> str:
    """What an error says, as far as a message can repeat it: its first line, or its kind where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


def one_line(thing: object) -> str:
    """``Class(setting=value, …)`` by the arguments of its class that it has kept; those that are None are left out.

    So is a part of several settings, where it is what the class has unless told otherwise.
    """
    kept = []
    for name, default in _arguments(type(thing)).items():
        value = getattr(thing, name, None)
        usual = dataclasses.is_dataclass(value) and value == default
        if value is not None and not usual:
            kept.append(f"{name}={brief(value)}")
    return f"{type(thing).__name__}({', '.join(kept)})"


def _arguments(kind: type) -> dict[str, object]:
    """Names and defaults of what a class is made with, also of classes above it that it passes ``**others`` on to."""
    found: dict[str, object] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        found = {name: parameter.default for name, parameter in parameters.items()} | found
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return found


def brief(value: object) -> str:
    """A setting: numbers to six places, functions by their names, and what does not say itself by its type."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return f"({', '.join(map(brief, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return one_line(value)
    own = getattr(type(value).__repr__, "__module__", "") or ""
    if isinstance(value, _PLAIN) or own.startswith("bullettrain."):  # one of ours, in a line
        return repr(value)
    return getattr(value, "__name__", type(value).__name__)


_PLAIN = (bool, int, float, str, tuple)


def meanings(kind: type) -> dict[str, str]:
    """By field of a dataclass, one at the top of its module: the string below it in the source, on one line."""
    body, found = _classes(kind.__module__)[kind.__name__].body, {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(below.value).split())
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module, as they are written; read once, since every command asks for its help."""
    source = ast.parse(inspect.getsource(sys.modules[module]))
    return {part.name: part for part in source.body if isinstance(part, ast.ClassDef)}
