"""Options that several commands take, and what is checked of options."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bullettrain.loading import LoadedModel

Model = Annotated[
    str,
    typer.Argument(
        help="A run's folder, a checkpoint (.safetensors), a state_dict (.pt) with --network, "
        "package.module:function or timm:NAME.",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None, typer.Option(help="Of a run: last, best or averaged. Default: best where it was chosen, else last.")
]
Network = Annotated[
    str | None,
    typer.Option(
        help="What the weights are of: wrn-34-10, package.module:function, timm:NAME. Default: what the file says."
    ),
]
Trust = Annotated[bool, typer.Option(help="Import and call the function that a file or run names as its network.")]
Mean = Annotated[str | None, typer.Option(help="Normalisation in front of a foreign network, e.g. 0.49,0.48,0.45.")]
Std = Annotated[str | None, typer.Option(help="With --mean.")]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Pixels a side, where the model does not say. Default: 32.")]
Channels = Annotated[int | None, typer.Option(min=1, help="Channels, where the model does not say. Default: 3.")]
Compile = Annotated[bool, typer.Option(help="Compile the network with torch.compile.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where datasets lie. Default: $BULLETTRAIN_DATA, then the user's cache.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU where there is one.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; again for more. `train --show` lists them."),
]
Count = Annotated[int, typer.Option(min=1)]
Number = Annotated[str | None, typer.Option(metavar="NUMBER")]


def check_known(said: str, value: str, known: Iterable[str]) -> None:
    """ConfigError where ``value`` is none of ``known``: what is ``said`` of it, and what may have been meant."""
    from bullettrain.config.settings import ConfigError
    from bullettrain.validation import instead

    known = list(known)
    if value not in known:
        raise ConfigError(f"{said} {value!r}{instead(value, known)}")


def check_apart(**given: object) -> None:
    """ConfigError where more than one of these options is given."""
    from bullettrain.config.settings import ConfigError

    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value not in (None, False)]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} do not go together; give one of them")


def load(
    model: str, weights: str | None, network: str | None, trust: bool, mean: str | None, std: str | None, **shape: int
) -> LoadedModel:
    """The network that these options name; ``shape`` is that of images, where the model does not say."""
    from bullettrain.config.settings import number
    from bullettrain.loading import load_model

    means, stds = ([number(part) for part in text.split(",")] if text is not None else None for text in (mean, std))
    return load_model(model, weights=weights, network=network, trust=trust, mean=means, std=stds, **shape)
