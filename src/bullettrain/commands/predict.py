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
    from bullettrain.evaluation.load_model import load_model
    from bullettrain.evaluation.specs import threat_in_words
    from bullettrain.processes import find_place

    console = terminal()
    place = find_place(device)
    subject = load_model(
        model,
        weights=weights,
        network=network,
        trust=trust,
        mean=options.numbers(mean),
        std=options.numbers(std),
        image_size=image_size or 32,
        channels=channels or 3,
    )
    about = subject.about.network
    assert about is not None
    pixels = read_images(images, channels=channels or about.channels, image_size=image_size or about.image_size)
    made = subject.network.to(place.device)
    with torch.no_grad():
        logits = torch.cat([made(to_unit(part.to(place.device))) for part in torch.split(pixels, BATCH)])
    shares = logits.float().softmax(dim=1).cpu()
    classes = subject.about.classes or tuple(str(index) for index in range(shares.shape[1]))
    order = shares.argsort(dim=1, descending=True)
    if as_json:
        found = [
            {
                "image": str(file),
                "class": classes[int(ranked[0])],
                "probability": float(share[ranked[0]]),
                "probabilities": {classes[int(index)]: float(share[index]) for index in ranked},
            }
            for file, share, ranked in zip(images, shares, order, strict=True)
        ]
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    threat = subject.about.threat
    said = f"{subject.name}" + (f", {subject.weights} weights" if subject.folder else "")
    said += f", trained to withstand {threat_in_words(threat.norm, threat.eps)}" if threat else ""
    console.print(said, style="dim", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("image", overflow="fold")
    table.add_column("class", style="bold", overflow="fold")
    table.add_column("probability", justify="right", no_wrap=True)
    if top > 1:
        table.add_column("next", style="dim")
    for file, share, ranked in zip(images, shares, order, strict=True):
        percent = [f"{100 * float(share[index]):.1f} %" for index in ranked[:top]]
        others = [f"{classes[int(index)]} {text}" for index, text in zip(ranked[1:top], percent[1:], strict=True)]
        table.add_row(str(file), classes[int(ranked[0])], percent[0], *([", ".join(others)] if top > 1 else []))
    console.print(table)
