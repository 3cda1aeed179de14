"""`bullettrain predict`: what a network takes images for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from bullettrain.cli import options
from bullettrain.terminal import percent, show_table, terminal

BATCH = 64


def predict(
    model: options.Model,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", show_default=False)],
    *,
    top: options.Count = 3,
    json_: bool = False,
    weights: options.Weights = None,
    network: options.Network = None,
    trust: options.Trust = False,
    mean: options.Mean = None,
    std: options.Std = None,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    device: options.Device = None,
) -> None:
    """Classify images: the likeliest classes, with their probabilities.

    Images are made grey or coloured and resized to what the network was trained on, as `--data folder:PATH` does.

    Examples:

      bullettrain predict runs/digits seven.png

      bullettrain predict runs/cifar10-trades photos/*.jpg --top 1 --json

    Args:
        images: Image files.
        top: Show so many classes of each image, likeliest first.
        json_: Print JSON, with the probability of every class.
    """
    import torch

    from bullettrain.data.augment import to_unit
    from bullettrain.data.files import read_images
    from bullettrain.evaluation.specs import threat_in_words
    from bullettrain.loading import with_shape
    from bullettrain.processes import find_place

    console = terminal()
    place = find_place(device)
    shape = {"image_size": image_size or 32, "channels": channels or 3}
    loaded = options.load(model, weights, network, trust, mean, std, **shape)
    about = with_shape(loaded, image_size=image_size, channels=channels).about
    assert about.network is not None
    pixels = read_images(images, channels=about.network.channels, image_size=about.network.image_size)
    made = loaded.network.to(place.device)
    with torch.no_grad():
        logits = torch.cat([made(to_unit(part.to(place.device))) for part in torch.split(pixels, BATCH)])
    found = []
    for file, shares in zip(images, logits.float().softmax(dim=1).tolist(), strict=True):
        ranked = sorted(zip(about.classes, shares, strict=True), key=lambda pair: -pair[1])
        found.append((str(file), ranked))
    if json_:
        values = [
            {"image": image, "class": ranked[0][0], "probability": ranked[0][1], "probabilities": dict(ranked)}
            for image, ranked in found
        ]
        typer.echo(json.dumps(values, indent=1, ensure_ascii=False))
        return
    said = f", trained to withstand {threat_in_words(**vars(about.threat))}" if about.threat else ""
    console.print(f"{loaded}{said}", style="dim", soft_wrap=True)
    rows = []
    for image, ranked in found:
        (best, share), *others = ranked[:top]
        after = ", ".join(f"{name} {percent(share)}" for name, share in others)
        rows.append((image, Text(best, "bold"), percent(share), Text(after, "dim")))
    show_table(console, ("image", "class", "probability", "next"), rows, left=("class", "next"))
