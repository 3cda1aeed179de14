"""Filters shared by several corruptions. Images are float64 (n, H, W, …).

Filters add term by term, in the order of scipy, instead of using matrix products, whose rounding depends on the
library, the device and the batch size. Results are truncated to bytes, so that in a uniform area the last bit decides
between two levels.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

SIDE = 32
"""Height and width of the images."""


def unit(images: Tensor) -> Tensor:
    """Convert bytes to float64 in [0, 1]."""
    return divide(images.double(), 255)


def divide(x: Tensor, by: float) -> Tensor:
    """Return ``x / by``, rounded once. For a Python number CUDA multiplies by 1 / by, and the last bit can differ."""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def to_bytes(x: Tensor) -> Tensor:
    """Clip to [0, 1], multiply by 255 and truncate, as for the released files."""
    return x.clamp(0, 1).mul_(255).to(torch.uint8)


def gaussian(x: Tensor, sigma: float, *, mode: str = "nearest", truncate: float = 4.0) -> Tensor:
    """Apply a gaussian filter over axes 1 and 2, equal bit for bit to scipy.ndimage.gaussian_filter."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return x
    weights = np.exp(-0.5 / (sigma * sigma) * np.arange(-radius, radius + 1) ** 2)
    outward = (weights / weights.sum())[radius:].tolist()
    for axis in (1, 2):
        x = _symmetric(x, outward, axis, mode)
    return x


def _symmetric(x: Tensor, weights: list[float], axis: int, mode: str) -> Tensor:
    """Correlate along ``axis`` with a symmetric kernel, given from the centre outward; adds from the ends inward."""
    size, radius = x.shape[axis], len(weights) - 1
    at = edge(torch.arange(-radius, size + radius, device=x.device), size, mode)
    padded = x.index_select(axis, at)
    total = x * weights[0]
    for i in range(radius, 0, -1):
        pair = padded.narrow(axis, radius - i, size) + padded.narrow(axis, radius + i, size)
        total += pair.mul_(weights[i])
    return total


def edge(at: Tensor, size: int, mode: str) -> Tensor:
    """Map positions outside 0 … size-1 to positions inside: "nearest" aaa|abc, "reflect" cba|abc, "mirror" cb|abc."""
    if mode == "nearest":
        return at.clamp(0, size - 1)
    period = 2 * size if mode == "reflect" else 2 * size - 2
    at = at.remainder(period)
    return torch.where(at < size, at, period - at - int(mode == "reflect"))


def clipped_zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the centre of ``x`` (n, S, S, …) to S×S, equal bit for bit to scipy.ndimage.zoom of order 1."""
    size = x.shape[1]
    crop = math.ceil(size / factor)
    top = (size - crop) // 2
    zoomed = round(crop * factor)
    trim = (zoomed - size) // 2
    scale = (crop - 1) / (zoomed - 1) if zoomed > 1 else 0.0
    at = torch.arange(trim, trim + size, dtype=torch.float64) * scale
    low = at.floor().clamp(max=crop - 1)
    before = (1 - (at - low)).to(x.device)
    after = 1 - before  # not at − low: scipy's weights add up to exactly 1
    first = low.long().to(x.device) + top
    second = (low.long() + 1).clamp(max=crop - 1).to(x.device) + top
    column = (1, -1) + (1,) * (x.ndim - 2)
    row = (1, 1, -1) + (1,) * (x.ndim - 3)
    total = torch.zeros_like(x, dtype=torch.float64)
    for rows, down in ((first, before), (second, after)):
        band = x.index_select(1, rows).double() * down.view(column)
        for columns, right in ((first, before), (second, after)):
            total += band.index_select(2, columns) * right.view(row)
    return total


def motion(x: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """Blur x (n, H, W, …) in [0, 255] along an angle for each image, degrees (n,). Returns whole numbers in float64.

    One-sided, as in ImageMagick: term i of 2·radius + 1 is i pixels along the angle, edges repeated.
    """
    n, height, width = x.shape[:3]
    angle = degrees * (math.pi / 180)
    weights = [math.exp(-i * i / (2 * sigma * sigma)) for i in range(2 * radius + 1)]
    total_weight = math.fsum(weights)
    rows, columns = (torch.arange(s, device=x.device) for s in (height, width))
    images = torch.arange(n, device=x.device)[:, None, None]
    total = torch.zeros_like(x, dtype=torch.float64)
    for i, weight in enumerate(weights):
        if weight < 1e-9 * total_weight:  # all further terms add up to less than 1e-4 of a level
            break
        dy, dx = ((i * d - 0.5).ceil().long() for d in (angle.sin(), angle.cos()))
        y = edge(rows + dy[:, None], height, "nearest")[:, :, None]
        x_at = edge(columns + dx[:, None], width, "nearest")[:, None, :]
        total += x[images, y, x_at].double() * (weight / total_weight)
    return total.add_(1e-3).floor_()


def bilinear(x: Tensor, y_at: Tensor, x_at: Tensor, mode: str) -> Tensor:
    """Interpolate x (n, H, W, C) at rows y_at and columns x_at, both (n, h, w)."""
    height, width = x.shape[1:3]
    images = torch.arange(len(x), device=x.device)[:, None, None]
    y_low, x_low = y_at.floor(), x_at.floor()
    down, right = (y_at - y_low)[..., None], (x_at - x_low)[..., None]
    total = torch.zeros((*y_at.shape, x.shape[3]), dtype=torch.float64, device=x.device)
    for dy, row_weight in ((0, 1 - down), (1, down)):
        rows = edge(y_low.long() + dy, height, mode)
        for dx, weight in ((0, 1 - right), (1, right)):
            columns = edge(x_low.long() + dx, width, mode)
            total += x[images, rows, columns] * row_weight * weight
    return total
