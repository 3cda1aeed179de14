"""`bullettrain export`: a trained network for other programs."""

from __future__ import annotations

from pathlib import Path

from bullettrain.cli import options
from bullettrain.terminal import terminal


def export(
    model: options.Model,
    *,
    format_: str = "onnx",
    out: Path | None = None,
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

    Args:
        format_: onnx, torch-export, hub.
        out: File, or folder of hub. Default: model.onnx, model.pt2 or hub, in the run's folder or here.
    """
    from bullettrain.exporting import FORMATS
    from bullettrain.exporting import export as write

    options.check_known("--format is", format_, FORMATS)
    shape = {"image_size": image_size or 32, "channels": channels or 3}
    loaded = options.load(model, weights, network, trust, mean, std, **shape)
    for path in write(loaded, format_, out or (loaded.folder or Path()) / FORMATS[format_]):
        terminal().print(f"written  {path}", soft_wrap=True)
