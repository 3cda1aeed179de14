"""Noise: gaussian, shot, impulse, speckle. Input and output are uint8 (n, 32, 32, 3)."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from bullettrain.corruptions.chance import Chance
from bullettrain.corruptions.filters import divide, to_bytes, unit


def gaussian_noise(images: Tensor, std: float, chance: Chance) -> Tensor:
    """Return x + N(0, std)."""
    return to_bytes(chance.normal(*images.shape[1:], std=std).add_(unit(images)))


def speckle_noise(images: Tensor, std: float, chance: Chance) -> Tensor:
    """Return x + x·N(0, std)."""
    x = unit(images)
    return to_bytes(chance.normal(*images.shape[1:], std=std).mul_(x).add_(x))


def impulse_noise(images: Tensor, share: float, chance: Chance) -> Tensor:
    """Replace each channel value with probability ``share`` by 0 or 255, equally often."""
    u = chance.uniform(*images.shape[1:])
    return images.masked_fill(u < share, 255).masked_fill_(u < share / 2, 0)


def shot_noise(images: Tensor, photons: float, chance: Chance) -> Tensor:
    """Return Poisson(x·photons) / photons."""
    sums, starts = (t.to(images.device) for t in _poisson(photons))
    level = images.long()
    # The distribution functions of the 256 levels, each shifted by its level, form one sorted sequence. A search for
    # level + u inverts that of the level at a uniform u.
    count = torch.searchsorted(sums, chance.uniform(*images.shape[1:]).add_(level), right=True).sub_(starts[level])
    return to_bytes(divide(count.double(), photons))


@functools.cache
def _poisson(photons: float) -> tuple[Tensor, Tensor]:
    """Return the distribution functions of Poisson(v/255·photons) plus v, v = 0 … 255, (256·K,), and their starts."""
    levels = torch.arange(256, dtype=torch.float64)
    rate = (levels / 255 * photons)[:, None]
    counts = torch.arange(math.ceil(photons + 12 * math.sqrt(photons) + 12), dtype=torch.float64)
    mass = (torch.xlogy(counts, rate) - rate - torch.lgamma(counts + 1)).exp()
    # Exactly 1 at the end despite rounding, so that no search ends at the next level.
    sums = mass.cumsum(1).clamp_(max=1)
    sums[:, -1] = 1
    return (sums + levels[:, None]).flatten(), torch.arange(256) * len(counts)
