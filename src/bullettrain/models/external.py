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

from bullettrain.models.normalize import Normalize

FORMS = "package.module:function or timm:NAME"


def is_external(name: str) -> bool:
    """Whether a network of that name is code that is not this package's."""
    return ":" in name


def build_external(
    text: str,
    *,
    pretrained: bool = False,
    num_classes: int | None = None,
    channels: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> nn.Module:
    """A network from `timm:NAME`, or from `package.module:function`, which is called without arguments.

    Args:
        text: which.
        pretrained: whether timm loads its weights.
        num_classes: what timm is to make it for; None: as timm has it.
        channels: likewise.
        mean: normalisation in front of it, one value a channel; None: timm's own, if it has one.
        std: with ``mean``.

    Raises:
        ValueError: there is no such network.
    """
    where, _, name = text.partition(":")
    if where == "timm":
        shape = {"num_classes": num_classes, "in_chans": channels}
        network = _of_timm(name, pretrained, {key: value for key, value in shape.items() if value is not None})
        own: Mapping[str, Any] = getattr(network, "pretrained_cfg", None) or {}
        mean, std = (own.get("mean"), own.get("std")) if mean is None and std is None else (mean, std)
    else:
        network = _from_function(text)
    if (mean is None) != (std is None):
        raise ValueError("mean and std go together: give both or neither")
    return network if mean is None or std is None else nn.Sequential(Normalize(mean, std), network)


def _from_function(text: str) -> nn.Module:
    where, _, name = text.partition(":")
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
    made: object = function()
    if not isinstance(made, nn.Module):
        raise ValueError(f"{text} returned {type(made).__name__}; it has to return a torch.nn.Module")
    return made


def _functions(module: types.ModuleType) -> list[str]:
    """What a module itself defines that can be called."""
    mine = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return [key for key, value in mine.items() if callable(value)]


def _offered(names: Iterable[str]) -> str:
    shown = [name for name in names if not name.startswith("_")]
    return f"; it has {', '.join(shown[:8])}" if shown else ""


def _of_timm(name: str, pretrained: bool, shape: Mapping[str, int]) -> nn.Module:
    try:
        import timm
    except ImportError as error:  # it needs torchvision, which no extra of ours brings
        raise ValueError(f"timm:{name} needs timm, which cannot be imported ({error}): pip install timm") from None
    try:
        network: nn.Module = timm.create_model(name, pretrained=pretrained, **shape)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"timm:{name}: {(str(error) or 'unknown').splitlines()[0]}") from None
    return network
