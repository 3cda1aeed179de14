"""Example images before and after the attack."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bullettrain.extras import extra
from bullettrain.mining import Category
from bullettrain.run_folder import Samples

PER_CATEGORY = 8
MAX_SHOWN_SIDE = 64
"""Maximum side in pixels; larger images are shrunk to keep the page small."""
AMPLIFIED = (20, 10, 5, 2, 1)


def amplification(samples: Samples) -> int:
    """Return the largest factor at which nearly all differences fit between black and white."""
    change = np.abs(samples.adversarial.astype(np.int16) - samples.clean.astype(np.int16))
    largest = float(np.quantile(change, 0.995)) if change.size else 0.0
    return next((factor for factor in AMPLIFIED if factor * largest <= 127), 1) if largest else 10


def strips(samples: Samples, factor: int, *, mined: bool) -> list[dict[str, Any]]:
    """Return a strip of examples for each category; if not ``mined``, a single strip without a name."""
    groups = {category.name.lower(): samples.category == category for category in Category}
    made = []
    for name, members in groups.items() if mined else [("", np.ones(len(samples.label), dtype=bool))]:
        chosen = np.flatnonzero(members)[:PER_CATEGORY]
        if len(chosen):
            untouched = bool((samples.clean[chosen] == samples.adversarial[chosen]).all())
            examples = [_example(samples, int(index), factor) for index in chosen]
            made.append({"category": name, "examples": examples, "untouched": untouched})
    return made


def _example(samples: Samples, index: int, factor: int) -> dict[str, Any]:
    """Return the images of an example, the names of its label and predictions, and whether these are right."""
    clean, adversarial = samples.clean[index], samples.adversarial[index]
    change = adversarial.astype(np.int32) - clean.astype(np.int32)
    grey = np.clip(128 + factor * change, 0, 255).astype(np.uint8)
    columns = (samples.label, samples.clean_prediction, samples.adversarial_prediction)
    label, before, after = (int(column[index]) for column in columns)
    names = [samples.classes[k] if 0 <= k < len(samples.classes) else f"class {k}" for k in (label, before, after)]
    images = [data_uri(image) for image in (clean, adversarial, grey)]
    return {"images": images, "names": names, "right_before": before == label, "right_after": after == label}


def data_uri(image: NDArray[np.uint8]) -> str:
    """Return a (C, H, W) image as a PNG data URI. Unless there are three channels, the first is shown."""
    with extra("a report"):
        from PIL import Image
    picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0) if len(image) == 3 else image[0]))
    if max(picture.size) > MAX_SHOWN_SIDE:
        picture.thumbnail((MAX_SHOWN_SIDE, MAX_SHOWN_SIDE))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
