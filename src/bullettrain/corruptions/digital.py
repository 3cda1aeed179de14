"""Digital: contrast, elastic transform, pixelate, JPEG, saturate. Input and output are uint8 (n, 32, 32, 3)."""

from __future__ import annotations

import functools
import io
import math

import numpy as np
import torch
from torch import Tensor

from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.colour import from_hsv, to_hsv
from bullettrain.corruptions.filters import SIDE, bilinear, gaussian, to_bytes, unit
from bullettrain.extras import extra

CORNERS = ((26.0, 26.0), (26.0, 6.0), (6.0, 6.0))
"""(x, y) of the three points that the elastic transform moves."""


def contrast(images: Tensor, factor: float, chance: Chance) -> Tensor:
    """Compute (x − m)·factor + m with the mean m of each image and channel."""
    x = unit(images)
    total = torch.zeros_like(x[:, 0, 0])
    for pixel in x.flatten(1, 2).unbind(1):  # in the order of numpy: the last bit matters
        total += pixel
    mean = (total / (SIDE * SIDE))[:, None, None]
    return to_bytes((x - mean) * factor + mean)


def saturate(images: Tensor, level: tuple[float, float], chance: Chance) -> Tensor:
    """Scale the saturation by a factor and add an amount."""
    factor, more = level
    hue, saturation, value = to_hsv(unit(images))
    return to_bytes(from_hsv(hue, (saturation * factor + more).clamp(0, 1), value))


def elastic_transform(images: Tensor, level: tuple[float, float, float], chance: Chance) -> Tensor:
    """Apply a random affine map and then a smooth random displacement. Levels are relative to the image's side."""
    strength, sigma, jitter = (SIDE * part for part in level)
    # Rounded to float32, as in the original: a uniform area stays uniform despite rounding errors of float64.
    x = _affine(unit(images).float().double(), chance.uniform(3, 2, low=-jitter, high=jitter)).float().double()
    dx, dy = chance.uniform(SIDE, SIDE, 2, low=-1, high=1).unbind(-1)
    dx, dy = (gaussian(d, sigma, mode="reflect", truncate=3) * strength for d in (dx, dy))
    at = torch.arange(SIDE, dtype=torch.float64, device=x.device)
    return to_bytes(bilinear(x, at[:, None] + dy, at + dx, "reflect").float())


def _affine(x: Tensor, moves: Tensor) -> Tensor:
    """Transform x (n, 32, 32, C) by the affine maps that move CORNERS by ``moves`` (n, 3, 2)."""
    to = moves + torch.tensor(CORNERS, dtype=x.dtype, device=x.device)
    # The inverse map, from targets to sources, is determined by the same three pairs of points.
    (ax, ay), (bx, by), (cx, cy) = ((corner[:, 0], corner[:, 1]) for corner in to.unbind(1))
    area = (ax - bx) * (cy - by) - (ay - by) * (cx - bx)
    at = torch.arange(SIDE, dtype=x.dtype, device=x.device)
    px, py = at - bx[:, None, None], at[:, None] - by[:, None, None]

    def share(ux: Tensor, uy: Tensor, wx: Tensor, wy: Tensor) -> Tensor:
        return (ux * wy[:, None, None] - uy * wx[:, None, None]) / area[:, None, None]

    # Pixel = B + s·(A − B) + t·(C − B), where for CORNERS A − B is 20 down and C − B is 20 left.
    s = share(px, py, cx - bx, cy - by)
    t = -share(px, py, ax - bx, ay - by)
    y_at, x_at = CORNERS[1][1] + 20 * s, CORNERS[1][0] - 20 * t
    return bilinear(x, y_at, x_at, "mirror")


def pixelate(images: Tensor, factor: float, chance: Chance) -> Tensor:
    """Shrink and enlarge with a box filter, equal byte for byte to Pillow."""
    small = int(SIDE * factor)
    return _box(_box(images, small), SIDE)


def _box(images: Tensor, size: int) -> Tensor:
    """Resize to size×size like Pillow: columns, then rows, in integers, rounded to bytes in between."""
    weights = _box_weights(images.shape[1], size).to(images.device)
    x = images.double()  # sums stay below 2^31, so that integers in float64 are exact in any order
    for axis in (2, 1):
        x = torch.tensordot(x.movedim(axis, -1), weights, dims=([-1], [1]))
        x = x.add_(1 << 21).div_(1 << 22).floor_().clamp_(0, 255).movedim(-1, axis)
    return x.to(torch.uint8).contiguous()


@functools.cache
def _box_weights(size: int, to: int) -> Tensor:
    """Return Pillow's fixed-point coefficients of the box filter, float64 (to, size), in units of 2^-22."""
    scale = size / to
    support = 0.5 * max(scale, 1.0)
    weights = torch.zeros(to, size, dtype=torch.float64)
    for row in range(to):
        centre = (row + 0.5) * scale
        low, high = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), size)
        inside = [i for i in range(low, high) if -0.5 < (i - centre + 0.5) / max(scale, 1.0) <= 0.5]
        weights[row, inside] = math.floor(0.5 + (1 << 22) / len(inside))
    return weights


def jpeg_compression(images: Tensor, quality: int, chance: Chance) -> Tensor:
    """Compress with Pillow's JPEG, one image at a time on the CPU; results depend on its libjpeg."""
    with extra("the corruption jpeg_compression", "corruptions"):
        from PIL import Image
    out = np.empty(tuple(images.shape), np.uint8)
    for row, image in zip(out, images.cpu().numpy(), strict=True):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality)
        row[:] = np.asarray(Image.open(buffer))
    return torch.from_numpy(out).to(images.device)
