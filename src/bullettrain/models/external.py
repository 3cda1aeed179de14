"""Networks that are not of this package: what a function of the user's returns, or timm's."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

Normalisation = tuple[Sequence[float] | None, Sequence[float] | None]
"""Mean and standard deviation, one value a channel."""

FORMS = "package.module:function or timm:NAME"


def is_external(name: str) -> bool:
    """Whether a network of that name is code that is not this package's."""
    return ":" in name


def build_external(
    text: str, *, pretrained: bool = False, num_classes: int | None = None, channels: int | None = None
) -> tuple[nn.Module, Normalisation]:
    """A network from `timm:NAME`, or from `package.module:function`, called without arguments; what it goes with.

    ``num_classes``, ``channels``: what timm is to make it for. ValueError where there is no such network.
    """
    where, _, name = text.partition(":")
    if where == "timm":
        shape = {"num_classes": num_classes, "in_chans": channels}
        return _of_timm(name, pretrained, {key: value for key, value in shape.items() if value is not None})
    if not where or not name.isidentifier() or not all(part.isidentifier() for part in where.split(".")):
        raise ValueError(f"{text!r} is no network; give {FORMS}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a module beside the user is found
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not where.startswith(error.name):
            raise
        raise ValueError(f"{text}: there is no module {error.name!r} here or among what is installed") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{text}: {where} has no function {name!r}{_offered(_functions(module))}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{text} is called without arguments, but: {error}") from None
    except ValueError:  # of a builtin: nobody knows before
        pass
    made = function()
    if not isinstance(made, nn.Module):
        raise ValueError(f"{text} returned {type(made).__name__}; it has to return a torch.nn.Module")
    return made, (None, None)


def _functions(module: types.ModuleType) -> list[str]:
    """What a module itself defines that can be called."""
    mine = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return [key for key, value in mine.items() if callable(value)]


def _offered(names: Iterable[str]) -> str:
    shown = [name for name in names if not name.startswith("_")]
    return f"; it has {', '.join(shown[:8])}" if shown else ""


def _of_timm(name: str, pretrained: bool, shape: Mapping[str, int]) -> tuple[nn.Module, Normalisation]:
    try:
        import timm
    except ImportError as error:  # it needs torchvision, which no extra of ours brings
        raise ValueError(f"timm:{name} needs timm, which cannot be imported ({error}): pip install timm") from None
    try:
        network: nn.Module = timm.create_model(name, pretrained=pretrained, **shape)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"timm:{name}: {(str(error) or 'unknown').splitlines()[0]}") from None
    about: Mapping[str, Any] = getattr(network, "pretrained_cfg", None) or {}
    return network, (about.get("mean"), about.get("std"))
