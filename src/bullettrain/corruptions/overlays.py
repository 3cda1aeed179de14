"""The photographs of frost that the corruption of that name lays over images."""

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
"""The five that the released files were made with; there is a sixth, which was never drawn."""


def read_overlays(folder: Path) -> tuple[Tensor, ...]:
    """The overlays at a fifth of their size, uint8 (h, w, 3) each, in the order red, green, blue.

    Every fifth pixel, beginning with the third, is what OpenCV's bilinear resize by 0.2 gives. The released code
    read them with OpenCV, as blue, green, red, and turned that round before adding them to its RGB images.
    """
    if absent := [name for name in FILES if not os.path.isfile(folder / name)]:
        what = "its overlays are" if len(absent) == len(FILES) else f"its overlay {absent[0]} is"
        raise DataError(
            f"frost is not made: {what} not in {folder}; put {', '.join(FILES[:-1])} and {FILES[-1]} there (PyPI's"
            " imagecorruptions wheel, a zip file, has them under imagecorruptions/frost)."
        )
    overlays = []
    for name in FILES:
        pixels = np.asarray(read_image(folder / name).convert("RGB"))[2::5, 2::5]
        if min(pixels.shape[:2]) <= SIDE:
            raise DataError(f"frost is not made: {folder / name} is too small, it is not the original overlay.")
        overlays.append(torch.from_numpy(pixels.copy()))
    return tuple(overlays)
