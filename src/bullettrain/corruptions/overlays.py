"""The photographs of frost for the corruption "frost"."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bullettrain.corruptions.filters import SIDE
from bullettrain.data.base import DataError
from bullettrain.data.files import read_image

FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""The five photographs of the released files; a sixth was never used."""


def read_overlays(folder: Path) -> tuple[Tensor, ...]:
    """Read the photographs at a fifth of their size, uint8 (h, w, 3) each, as RGB.

    OpenCV's bilinear resize by 0.2 in the released code equals every fifth pixel, from the third on.

    Raises:
        DataError: a photograph is missing or damaged.
    """
    if missing := [name for name in FILES if not os.path.isfile(folder / name)]:
        what = "its overlays are" if len(missing) == len(FILES) else f"its overlay {missing[0]} is"
        there = "PyPI's imagecorruptions wheel, a zip file, has them under imagecorruptions/frost"
        raise DataError(f"frost is not made: {what} not in {folder}; put {', '.join(FILES)} there ({there}).")
    overlays = []
    for name in FILES:
        pixels = np.asarray(read_image(folder / name).convert("RGB"))[2::5, 2::5]
        if min(pixels.shape[:2]) <= SIDE:
            raise DataError(f"frost is not made: {folder / name} is too small, it is not the original overlay.")
        overlays.append(torch.from_numpy(pixels.copy()))
    return tuple(overlays)
