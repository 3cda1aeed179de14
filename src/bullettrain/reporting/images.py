"""The strip of example images: clean, attacked, and what changed, amplified."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bullettrain.extras import extra
from bullettrain.mining import Category
from bullettrain.run_folder import Samples

PER_CATEGORY = 8
LARGEST = 64  # pixels a side: larger images are shrunk, to keep the page small
AMPLIFIED = (20, 10, 5, 2, 1)


@dataclass(frozen=True)
class Example:
    """One example: three images as data URIs and the names of its label and predictions."""

    clean: str
    adversarial: str
    difference: str
    label: str
    before: str
    after: str
    right_before: bool
    right_after: bool


@dataclass(frozen=True)
class Strip:
    """The examples of one category, or of none in particular."""

    category: str
    examples: list[Example]
    untouched: bool
    """Whether the attack changed none of them."""


def amplification(samples: Samples) -> int:
    """The largest factor at which nearly every difference still fits between black and white around grey."""
    change = np.abs(samples.adversarial.astype(np.int16) - samples.clean.astype(np.int16))
    largest = float(np.quantile(change, 0.995)) if change.size else 0.0
    return next((factor for factor in AMPLIFIED if factor * largest <= 127), 1) if largest else 10


def strips(samples: Samples, factor: int, *, mined: bool) -> list[Strip]:
    """One strip for each category that has examples; where nothing was ``mined``, one without a name for all."""
    groups = {category.name.lower(): samples.category == category for category in Category}
    found = []
    for name, members in groups.items() if mined else [("", np.ones(len(samples.label), dtype=bool))]:
        chosen = np.flatnonzero(members)[:PER_CATEGORY]
        if len(chosen):
            untouched = bool((samples.clean[chosen] == samples.adversarial[chosen]).all())
            examples = [_example(samples, int(index), factor) for index in chosen]
            found.append(Strip(name, examples, untouched))
    return found


def _example(samples: Samples, index: int, factor: int) -> Example:
    clean, adversarial = samples.clean[index], samples.adversarial[index]
    change = adversarial.astype(np.int32) - clean.astype(np.int32)
    grey = np.clip(128 + factor * change, 0, 255).astype(np.uint8)
    label, before, after = (
        int(column[index]) for column in (samples.label, samples.clean_prediction, samples.adversarial_prediction)
    )
    names = [samples.classes[k] if 0 <= k < len(samples.classes) else f"class {k}" for k in (label, before, after)]
    uris = [data_uri(image) for image in (clean, adversarial, grey)]
    return Example(uris[0], uris[1], uris[2], names[0], names[1], names[2], before == label, after == label)


def data_uri(image: NDArray[np.uint8]) -> str:
    """A (C, H, W) image as a PNG data URI; neither one nor three channels: the first is shown."""
    with extra("a report"):
        from PIL import Image
    pixels = image.transpose(1, 2, 0) if len(image) == 3 else image[0]
    picture = Image.fromarray(np.ascontiguousarray(pixels))
    if max(picture.size) > LARGEST:
        picture.thumbnail((LARGEST, LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
