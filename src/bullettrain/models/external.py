"""Networks from outside this package: from a function of the user, or from timm."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from bullettrain.errors import raised_as
from bullettrain.models.normalize import normalization
from bullettrain.validation import check_takes


def is_external(name: str) -> bool:
    """Return whether ``name`` refers to code outside this package."""
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
    """Build the network `timm:NAME`, or call `package.module:function` without arguments.

    Args:
        text: the name, in one of these two forms.
        pretrained: whether timm loads its pretrained weights.
        num_classes: passed to timm; None keeps timm's default.
        channels: likewise.
        mean: of the normalisation in front of the network, per channel; None uses timm's, if it has one.
        std: likewise; give both or neither.

    Raises:
        ValueError: there is no such network.
    """
    where, _, name = text.partition(":")
    if where == "timm":
        shape = {"num_classes": num_classes, "in_chans": channels}
        network = _from_timm(name, pretrained, {key: value for key, value in shape.items() if value is not None})
        config: Mapping[str, Any] = getattr(network, "pretrained_cfg", None) or {}
        mean, std = (config.get("mean"), config.get("std")) if mean is None and std is None else (mean, std)
    else:
        network = _from_function(text)
    normalize = normalization(mean, std)
    return network if isinstance(normalize, nn.Identity) else nn.Sequential(normalize, network)


def _from_function(text: str) -> nn.Module:
    where, _, name = text.partition(":")
    if not where or not name.isidentifier() or not all(part.isidentifier() for part in where.split(".")):
        raise ValueError(f"{text!r} is no network; give package.module:function or timm:NAME")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does, to find modules in the current folder
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not where.startswith(error.name):
            raise
        raise ValueError(f"{text}: there is no module {error.name!r} in this folder or installed") from None
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == where]
        public = [key for key in own if callable(vars(module)[key]) and not key.startswith("_")]
        available = f"; it has {', '.join(public[:8])}" if public else ""
        raise ValueError(f"{text}: {where} has no function {name!r}{available}")
    with raised_as(ValueError, "{error}", TypeError):
        check_takes(function, f"function {text}", ())
    network: object = function()
    if not isinstance(network, nn.Module):
        raise ValueError(f"{text} returned {type(network).__name__}; it has to return a torch.nn.Module")
    return network


def _from_timm(name: str, pretrained: bool, shape: Mapping[str, int]) -> nn.Module:
    missing = f"timm:{name} needs timm, which cannot be imported ({{error}}): pip install timm"
    with raised_as(ValueError, missing, ImportError):  # also without torchvision, which timm imports
        import timm
    with raised_as(ValueError, f"timm:{name}: {{error}}", RuntimeError, ValueError):
        network: nn.Module = timm.create_model(name, pretrained=pretrained, **shape)
    return network
