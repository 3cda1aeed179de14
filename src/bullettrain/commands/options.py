"""Options that several commands take: which network, and where it comes from."""

from __future__ import annotations

from typing import Annotated

import typer

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
Trust = Annotated[bool, typer.Option("--trust", help="Import and call the function that a run or checkpoint names.")]
Mean = Annotated[str | None, typer.Option(help="Normalisation in front of a foreign network, e.g. 0.49,0.48,0.45.")]
Std = Annotated[str | None, typer.Option(help="With --mean.")]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Pixels a side, where the model does not say. Default: 32.")]
Channels = Annotated[
    int | None, typer.Option(min=1, help="Channels of images, where the model does not say. Default: 3.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: a GPU where there is one.")]
