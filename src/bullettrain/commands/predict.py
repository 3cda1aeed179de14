"""`bullettrain predict`: what a network takes images for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bullettrain.commands import options
from bullettrain.terminal import terminal

BATCH = 64


def predict(
    model: options.Model,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files.", show_default=False)],
    top: Annotated[int, typer.Option(min=1, help="Show so many classes of each image, likeliest first.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the probability of every class.")] = False,
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
    """
    import torch
    from rich.table import Table

    from bullettrain.data.augment import to_unit
    from bullettrain.data.files import read_images
    from bullettrain.evaluation.specs import threat_in_words
    from bullettrain.loading import load_model, with_shape
    from bullettrain.processes import find_place

    console = terminal()
    place = find_place(device)
    loaded = load_model(model, weights, network, trust, mean, std, image_size=image_size, channels=channels)
    about = with_shape(loaded).about
    assert about.network is not None
    pixels = read_images(images, channels=about.network.channels, image_size=about.network.image_size)
    made = loaded.network.to(place.device)
    with torch.no_grad():
        logits = torch.cat([made(to_unit(part.to(place.device))) for part in torch.split(pixels, BATCH)])
    found = []
    for file, shares in zip(images, logits.float().softmax(dim=1).tolist(), strict=True):
        ranked = sorted(zip(about.classes, shares, strict=True), key=lambda pair: -pair[1])
        found.append((str(file), ranked))
    if as_json:
        values = [
            {"image": image, "class": ranked[0][0], "probability": ranked[0][1], "probabilities": dict(ranked)}
            for image, ranked in found
        ]
        typer.echo(json.dumps(values, indent=1, ensure_ascii=False))
        return
    said = f", trained to withstand {threat_in_words(**vars(about.threat))}" if about.threat else ""
    console.print(f"{loaded}{said}", style="dim", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("image", overflow="fold")
    table.add_column("class", style="bold", overflow="fold")
    table.add_column("probability", justify="right", no_wrap=True)
    if top > 1:
        table.add_column("next", style="dim")
    for image, ranked in found:
        (best, share), *others = ranked[:top]
        after = ", ".join(f"{name} {100 * share:.1f} %" for name, share in others)
        table.add_row(image, best, f"{100 * share:.1f} %", *([after] if top > 1 else []))
    console.print(table)
