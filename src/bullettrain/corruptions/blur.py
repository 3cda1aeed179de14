"""Blurs: defocus, glass, motion, zoom, gaussian. Input and output are uint8 (n, 32, 32, 3)."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.filters import SIDE, clipped_zoom, divide, edge, gaussian, motion, to_bytes, unit


def gaussian_blur(images: Tensor, sigma: float, chance: Chance) -> Tensor:
    """Blur with a gaussian of ``sigma`` pixels, edges repeated."""
    return to_bytes(gaussian(unit(images), sigma))


def defocus_blur(images: Tensor, level: tuple[float, float], chance: Chance) -> Tensor:
    """Blur with a disk of the given radius and softened rim, edges mirrored."""
    kernel = _disk(*level)
    reach = len(kernel) // 2
    x = unit(images)
    at = edge(torch.arange(-reach, SIDE + reach, device=x.device), SIDE, "mirror")
    padded = x.index_select(1, at).index_select(2, at)
    total = torch.zeros_like(x)
    for i, row in enumerate(kernel):
        for j, weight in enumerate(row):
            if weight:
                total += padded[:, i : i + SIDE, j : j + SIDE] * weight
    return to_bytes(total)


def glass_blur(images: Tensor, level: tuple[float, int, int], chance: Chance) -> Tensor:
    """Replace each pixel by itself or a neighbour above or left of it, several times, between two gaussians.

    The original replaces pixels from last to first, and each reads only pixels before it. So within a pass all read
    unchanged values and can be replaced at once.
    """
    sigma, reach, passes = level
    x = to_bytes(gaussian(unit(images), sigma))
    n = len(x)
    inner = torch.arange(reach + 1, SIDE - reach + 1, device=x.device)
    rows = torch.arange(n, device=x.device)[:, None, None]
    for _ in range(passes):
        up, left = chance.below(2 * reach, 2, len(inner), len(inner)).unbind(1)
        source = x[rows, inner[:, None] - up, inner - left]
        x = x.clone()
        x[:, inner[0] :, inner[0] :] = source
    return to_bytes(gaussian(unit(x), sigma))


def motion_blur(images: Tensor, level: tuple[int, float], chance: Chance) -> Tensor:
    """Blur along a random angle within 45° of the horizontal."""
    radius, sigma = level
    return motion(images, radius, sigma, chance.uniform(low=-45, high=45)).to(torch.uint8)


def zoom_blur(images: Tensor, end: float, chance: Chance) -> Tensor:
    """Average the image and its enlargements by 1, 1.01, … up to ``end``, in float32 as in the original."""
    x = unit(images).float()
    factors = np.arange(1, end, 0.01).tolist()
    total = torch.zeros_like(x)
    for factor in factors:
        total += clipped_zoom(x, factor).float()
    return to_bytes(divide(x + total, len(factors) + 1))


@functools.cache
def _disk(radius: float, soften: float) -> list[list[float]]:
    """Return the weights of a disk blurred by a 3×3 gaussian in float32, bit for bit as OpenCV's GaussianBlur."""
    reach = math.floor(radius) + 1  # one more for the gaussian
    at = np.arange(-reach, reach + 1)
    disk = (at[:, None] ** 2 + at**2 <= radius**2).astype(np.float32)
    disk /= disk.sum()
    side = math.exp(-1 / (2 * soften**2))
    outer, centre = (np.float32(w / (1 + 2 * side)) for w in (side, 1.0))
    for _ in range(2):  # down, then across
        padded = np.pad(disk, ((1, 1), (0, 0)))
        disk = ((padded[:-2] + padded[2:]) * outer + padded[1:-1] * centre).T
    return [[float(w) for w in row] for row in disk]
