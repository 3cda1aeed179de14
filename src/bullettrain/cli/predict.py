"""`bullettrain predict`: classify image files."""

import itertools
import json
import os

import torch
import typer
from rich.text import Text

from bullettrain.cli.commands import Predict
from bullettrain.cli.options import load
from bullettrain.data.augment import to_unit
from bullettrain.data.files import files_in, read_images
from bullettrain.evaluation.specs import threat_in_words
from bullettrain.loading import with_shape
from bullettrain.processes import find_place
from bullettrain.terminal import percent, show_table, terminal

BATCH_SIZE = 64


def predict(options: Predict) -> None:
    """Run `bullettrain predict`."""
    console, place = terminal(), find_place(options.device)
    loaded = load(options, image_size=options.image_size, channels=options.channels)
    about = with_shape(loaded).about
    assert about.network is not None
    parts = (files_in(path, nested=True) if os.path.isdir(path) else [path] for path in options.images)
    files = list(itertools.chain.from_iterable(parts))
    pixels = read_images(files, channels=about.network.channels, image_size=about.network.image_size)
    network = loaded.network.to(place.device)
    with torch.no_grad():
        logits = torch.cat([network(to_unit(part.to(place.device))) for part in torch.split(pixels, BATCH_SIZE)])
    predictions = []
    for file, shares in zip(files, logits.float().softmax(dim=1).tolist(), strict=True):
        ranked = sorted(zip(about.classes, shares, strict=True), key=lambda pair: -pair[1])
        predictions.append((str(file), ranked))
    if options.json_:
        values = [
            {"image": image, "class": ranked[0][0], "probability": ranked[0][1], "probabilities": dict(ranked)}
            for image, ranked in predictions
        ]
        typer.echo(json.dumps(values, indent=1, ensure_ascii=False))
        return
    threat = f", trained to withstand {threat_in_words(**vars(about.threat))}" if about.threat else ""
    console.print(f"{loaded}{threat}", style="dim", soft_wrap=True)
    rows = []
    for image, ranked in predictions:
        (best, share), *others = ranked[: options.top]
        after = ", ".join(f"{name} {percent(share)}" for name, share in others)
        rows.append((image, Text(best, "bold"), percent(share), Text(after, "dim")))
    show_table(console, ("image", "class", "probability", "next"), rows, left=("class", "next"))
