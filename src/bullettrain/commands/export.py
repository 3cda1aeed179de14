"""`bullettrain export`: a trained network for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bullettrain.commands import options
from bullettrain.terminal import terminal


def export(
    model: options.Model,
    form: Annotated[str, typer.Option("--format", help="onnx, torch-export, hub.")] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option(
            help="File, or folder of hub. Default: model.onnx, model.pt2 or hub, in the run's folder or here."
        ),
    ] = None,
    weights: options.Weights = None,
    network: options.Network = None,
    trust: options.Trust = False,
    mean: options.Mean = None,
    std: options.Std = None,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
) -> None:
    """Write a network for deployment: normalisation inside, images in [0, 1] to logits, batches of any size.

    onnx runs in ONNX Runtime, torch-export in `torch.export.load`. hub is a folder with model.safetensors, config.json,
    a model card with the accuracies that `bullettrain evaluate` found, and the fields of RobustBench's model_info;
    `bullettrain.load` reads it.

    Examples:

      bullettrain export runs/digits --format onnx

      bullettrain export runs/cifar10-trades --format hub --weights averaged --out my-model
    """
    from bullettrain.config.settings import ConfigError
    from bullettrain.exporting import FORMATS
    from bullettrain.exporting import export as write
    from bullettrain.loading import load_model
    from bullettrain.validation import instead

    if form not in FORMATS:
        raise ConfigError(f"--format is {form!r}{instead(form, FORMATS)}")
    loaded = load_model(model, weights, network, trust, mean, std, image_size=image_size, channels=channels)
    for path in write(loaded, form, out or (loaded.folder or Path()) / FORMATS[form]):
        terminal().print(f"written  {path}", soft_wrap=True)
